"""Value zeroing against brute force, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import overt
from families import BY_NAME, inputs_of, tokens
from overt.attaching import find
from overt.tracing.copies import Copies
from overt.tracing.mixing import value_zeroing
from selection import covering

MIXING = "value-zeroing"
NEAR: dict[str, Any] = {"atol": 1e-5, "rtol": 0.0}


class Layer(nn.Module):
    """An encoder layer in the open: scores, weights, values, all at hand."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)
        x = self.norm(x + mixed)
        return x + self.narrow(F.gelu(self.wide(x)))

    def by_hand(self, x: Tensor, hidden: Tensor | None, zeroed: int | None) -> Tensor:
        """The same from its parameters, (tokens, width) of one example, with one token's values zeroed."""
        width, heads = x.shape[-1], self.attention.num_heads
        weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
        q, k, v = (x @ weight.T + bias).split(width, dim=-1)
        if zeroed is not None:
            v = v.clone()
            v[zeroed] = 0.0
        mixed = torch.zeros_like(x)
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            scores = q[:, part] @ k[:, part].T / (width // heads) ** 0.5
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            mixed[:, part] = scores.softmax(dim=-1) @ v[:, part]
        x = self.norm(x + mixed @ self.attention.out_proj.weight.T + self.attention.out_proj.bias)
        return x + self.narrow(F.gelu(self.wide(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, hidden)
        return x


def brute_force(network: Network, x: Tensor, hidden: Tensor | None) -> list[Tensor]:
    """Both layers' maps of one example by the definition, a cell at a time."""
    found = []
    for layer in network.layers:
        assert isinstance(layer, Layer)
        whole = layer.by_hand(x, hidden, None)
        rows = []
        for i in range(len(x)):
            far = []
            for j in range(len(x)):
                other = layer.by_hand(x, hidden, j)[i]
                cosine = (whole[i] @ other) / (whole[i].norm() * other.norm())
                far.append(1.0 - float(cosine))
            rows.append([one / sum(far) for one in far])
        found.append(torch.tensor(rows))
        x = whole
    return found


@torch.no_grad()
def test_maps_are_cosine_distances_by_brute_force() -> None:
    network = Network().double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[1, 4:] = True
    traced = overt.trace(network, {"x": x, "hidden": hidden}, mixing=MIXING)
    for example in range(3):
        expected = brute_force(network, x[example], hidden[example])
        for layer in range(2):
            torch.testing.assert_close(traced.maps[layer][example], expected[layer].float(), **NEAR)
    # The residual is in the maps: rollout is their product, by default.
    product = traced.maps[1].double() @ traced.maps[0].double()
    real = traced.mask[1]
    torch.testing.assert_close(traced.rollout()[0, 1], product[0], **NEAR)
    torch.testing.assert_close(traced.rollout()[1, 1][real][:, real], product[1][real][:, real], **NEAR)
    assert not torch.allclose(traced.rollout(residual=0.5), traced.rollout(), atol=1e-3)


@torch.no_grad()
def hugging_face(model: Any, inputs: dict[str, Tensor], layers: nn.ModuleList, path: str) -> list[Tensor]:
    """Maps of a BERT by a hook on its value projections, layer by layer, from its hidden states."""
    states = model(**inputs, output_hidden_states=True).hidden_states
    found = []
    for number, layer in enumerate(layers):
        whole = states[number + 1].double()
        cells = []
        for token in range(whole.shape[1]):
            value = layer.get_submodule(path)

            def zero(_: Any, __: Any, output: Tensor, token: int = token) -> Tensor:
                output = output.clone()
                output[:, token] = 0.0
                return output

            handle = value.register_forward_hook(zero)
            changed = model(**inputs, output_hidden_states=True).hidden_states
            handle.remove()
            # What lies below is as it was, so this is the layer's own difference.
            cells.append(1.0 - F.cosine_similarity(changed[number + 1].double(), whole, dim=-1))
        found.append(torch.stack(cells, dim=-1))
    return found


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3, 128])
def test_a_hugging_face_encoder_gives_what_hooks_on_its_values_give(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_zeroing, "MOST_ROWS", rows)
    model = BY_NAME["BERT"].make()
    inputs = inputs_of(BY_NAME["BERT"], padded=True)
    traced = overt.trace(model, inputs, mixing=MIXING)
    cells = hugging_face(model, inputs, model.get_submodule("bert.encoder.layer"), "attention.self.value")
    for number, wanted in enumerate(cells):
        wanted = wanted.masked_fill(~traced.mask.unsqueeze(1), 0.0)
        wanted = wanted / wanted.sum(dim=-1, keepdim=True)
        for example, real in enumerate(traced.mask):
            got = traced.maps[number][example][real]
            torch.testing.assert_close(got.double(), wanted[example][real], **NEAR)


@pytest.mark.parametrize("name", ["BERT", "Llama", "GPT-2", "ViT", "T5", "BART"])
def test_rows_sum_to_one_and_the_future_has_no_part(name: str) -> None:
    family = BY_NAME[name]
    traced = overt.trace(family.make(), inputs_of(family), mixing=MIXING)
    rows = traced.raw()
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones_like(rows.sum(dim=-1)), **NEAR)
    rolled = traced.rollout()
    torch.testing.assert_close(rolled.sum(dim=-1), torch.ones_like(rolled.sum(dim=-1)), **NEAR)
    if traced.kind != "encoder":
        own = rows[..., traced.first :]
        assert not own.triu(1).any()
    if traced.cross:
        # Both ways of a decoder's layer share a row, and rollout follows both down.
        assert bool((traced.cross[0].sum(dim=-1) < 1.0).all())
        torch.testing.assert_close(rolled[:, 0, :, traced.first :], rows[:, 0, :, traced.first :], **NEAR)
        through = traced.encoder.rollout(layers=-1)[:, 0]
        torch.testing.assert_close(
            rolled[:, 0, :, : traced.first], rows[:, 0, :, : traced.first] @ through, **NEAR
        )
    assert traced.flow(queries=0, layers=0, progress=False).min() >= 0.0


def test_a_model_is_left_as_it_was_and_answers_as_it_did() -> None:
    family = BY_NAME["BERT"]
    model = family.make().train()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    traced = overt.trace(model, tokens(), mixing=MIXING)
    plain = overt.trace(model, tokens(), mixing="norm")  # which runs eager attention, too
    assert torch.equal(traced.outputs, plain.outputs)  # type: ignore[arg-type]
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.training


@pytest.mark.slow
def test_a_bayesian_model_has_posterior_samples_of_it() -> None:
    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Bayesian(k=3.0))
    traced = overt.trace(model, tokens(), mixing=MIXING, samples=2)
    again = overt.trace(model, tokens(), mixing=MIXING, samples=2)
    assert torch.equal(traced.maps[1], overt.trace(model, tokens(), mixing=MIXING).maps[1])
    assert torch.equal(traced.draws[1].maps[1], again.draws[1].maps[1])
    assert not torch.allclose(traced.draws[0].maps[1], traced.draws[1].maps[1], atol=1e-4)


def rows_of_runs(monkeypatch: pytest.MonkeyPatch, layer: Any) -> tuple[list[int], list[int]]:
    """Rows of each run of a layer, and of each map that is made of scores in it, filled as it runs."""
    runs: list[int] = []
    maps: list[int] = []
    layer.register_forward_pre_hook(lambda _module, args: runs.append(len(args[0])))
    softmax = F.softmax

    def counted(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        maps.append(len(scores))
        return softmax(scores, *args, **kwargs)

    monkeypatch.setattr(F, "softmax", counted)
    return runs, maps


def test_copies_of_a_layer_share_the_weights_of_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = BY_NAME["BERT"].make().eval()
    inputs = inputs_of(BY_NAME["BERT"], padded=True)
    batch, count = inputs["input_ids"].shape
    overt.trace(model, inputs, mixing=MIXING)  # what is asked of a class of attentions once
    runs, maps = rows_of_runs(monkeypatch, model.get_submodule("bert.encoder.layer.0"))
    overt.trace(model, inputs, mixing=MIXING)
    assert max(runs) == batch * count
    assert set(maps) == {batch}
    maps.clear()
    monkeypatch.setattr(value_zeroing, "MOST_TOKENS", 0)
    overt.trace(model, inputs, mixing=MIXING)
    assert max(maps) == batch * count


@pytest.fixture
def shared_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Copies, and rows, of each run whose copies shared weights."""
    runs: list[tuple[int, int]] = []
    apart = Copies.apart

    def counted(self: Copies, output: Tensor) -> Tensor:
        found = apart(self, output)
        assert found.is_contiguous()
        runs.append((self.count, len(found)))
        return found

    monkeypatch.setattr(Copies, "apart", counted)
    return runs


SHARING = ["BERT", "Llama", "GPT-2", "ViT", "T5", "BART", "Gemma 2", "Mistral"]


@pytest.mark.parametrize(
    ("name", "form", "most"),
    covering(
        [(name, form, most) for most in (128, 11) for form in ("plain", "Bayesian") for name in SHARING],
        # every pair of values
        [
            (name, form, (128, 11)[(number + place) % 2])
            for number, name in enumerate(SHARING)
            for place, form in enumerate(("plain", "Bayesian"))
        ],
    ),
)
def test_maps_are_the_same_whether_copies_share_weights_or_not(
    name: str,
    form: str,
    most: int,
    shared_runs: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(value_zeroing, "MOST_ROWS", most)
    family = BY_NAME[name]
    model: Any = family.make()
    if form == "Bayesian":
        overt.attach(model, overt.Bayesian(k=3.0))
    inputs = inputs_of(family, padded=name != "ViT")
    samples = 0 if form == "plain" else 1
    shared = overt.trace(model, inputs, mixing=MIXING, samples=samples)
    encoder = shared.encoder if shared.cross else shared
    assert len(shared_runs) >= 2 * len(encoder.maps), "each layer is tried, and runs"
    assert len({rows // copies for copies, rows in shared_runs}) == 1
    count = len(shared_runs)
    monkeypatch.setattr(value_zeroing, "MOST_TOKENS", 0)
    apart = overt.trace(model, inputs, mixing=MIXING, samples=samples)
    assert len(shared_runs) == count
    pairs = [(shared, apart), *zip(shared.draws or (), apart.draws or (), strict=True)]
    assert len(pairs) == 1 + samples
    for one, other in pairs:
        for ours, theirs in zip(one.maps, other.maps, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def root_mean_square(mixed: Tensor, value: Tensor) -> Tensor:
    del value
    return mixed / mixed.square().mean(dim=-1, keepdim=True).sqrt()


def without_own_direction(mixed: Tensor, value: Tensor) -> Tensor:
    own = F.normalize(value.transpose(1, 2), dim=-1)
    return mixed - (mixed * own).sum(dim=-1, keepdim=True) * own


@pytest.mark.parametrize("changed", [root_mean_square, without_own_direction])
@pytest.mark.parametrize("most", [128, 6])
def test_copies_that_would_change_each_other_share_nothing(
    changed: Any, most: int, shared_runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that is not linear in its values."""
    from transformers.models.bert import modeling_bert

    eager = modeling_bert.eager_attention_forward

    def other(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = eager(module, query, key, value, *args, **kwargs)
        return changed(mixed, value), weights

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", other)
    monkeypatch.setattr(value_zeroing, "MOST_ROWS", most)
    monkeypatch.setattr(find, "_plain", {})  # what is known of BERT's own
    model = BY_NAME["BERT"].make().eval()
    found = overt.trace(model, tokens(), mixing=MIXING)
    assert len(shared_runs) == model.config.num_hidden_layers, "tried once in each layer"
    monkeypatch.setattr(value_zeroing, "MOST_TOKENS", 0)
    wanted = overt.trace(model, tokens(), mixing=MIXING)
    for ours, theirs in zip(found.maps, wanted.maps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_hook_that_reads_weights_has_them(shared_runs: list[tuple[int, int]]) -> None:
    model = BY_NAME["BERT"].make().eval()
    wanted = overt.trace(model, tokens(), mixing=MIXING)
    shared_runs.clear()
    rows: list[int] = []
    attention = model.get_submodule("bert.encoder.layer.0.attention.self")
    attention.register_forward_hook(lambda _module, _args, output: rows.append(len(output[1].sum(dim=-1))))
    found = overt.trace(model, tokens(), mixing=MIXING)
    assert max(rows) > len(tokens())
    for ours, theirs in zip(found.maps, wanted.maps, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_copies_are_laid_side_by_side_and_taken_apart() -> None:
    copies = Copies("layer", 3)
    value = torch.randn(6, 2, 5, 4)  # three copies of two examples
    joined = copies.side_by_side(value)
    for copy in range(3):
        for example in range(2):
            own = joined[example, ..., 4 * copy : 4 * copy + 4]
            assert torch.equal(own, value[2 * copy + example])
    assert torch.equal(copies.apart(joined.transpose(1, 2)), value.transpose(1, 2))
    mask, bias = torch.randn(6, 1, 5, 5), torch.randn(1, 2, 5, 5)
    assert torch.equal(copies.first(mask, 6), mask[:2])
    assert copies.first_of({"bias": bias, "lengths": (lengths := torch.arange(6)), "scale": 2.0}, 6) == {
        "bias": bias,
        "lengths": lengths,
        "scale": 2.0,
    }
    copies.begin()
    with pytest.raises(ValueError, match="layer attends twice in one run of its layer"):
        copies.begin()
    for shape in ((2, 5, 12), (2, 5, 2, 13)):
        with pytest.raises(ValueError, match="layer must give outputs of shape"):
            copies.apart(torch.zeros(shape))


@pytest.mark.parametrize("samples", [0, 2])
def test_a_bayesian_layer_that_draws_runs_in_copies_only_if_they_share_weights(
    monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    model: Any = BY_NAME["BERT"].make().eval()
    overt.attach(model, overt.Bayesian(k=3.0))
    calls: list[int] = []
    layer = model.base_model.encoder.layer[1]
    layer.register_forward_hook(lambda _module, args, _output: calls.append(len(args[0])))
    counts, traces = [], []
    for most, name in ((128, ""), (128, "MOST_TOKENS"), (1, "MOST_ROWS")):
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(value_zeroing, "MOST_ROWS", most)
            if name:
                patched.setattr(value_zeroing, name, min(most, 1))
            traces.append(overt.trace(model, tokens(), mixing=MIXING, samples=samples))
        counts.append(len(calls))
        assert (max(calls) > len(tokens())) == (most > 1)
    shared, apart, alone = counts
    assert shared < alone
    assert (shared < apart) == (samples > 0), "copies draw other noise, unless they share it"
    for found in traces[:2]:
        pairs = [(found, traces[2]), *zip(found.draws or (), traces[2].draws or (), strict=True)]
        assert len(pairs) == 1 + samples
        for one, other in pairs:
            for ours, theirs in zip(one.maps, other.maps, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_an_attention_outside_of_all_layers_is_refused() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="has no map of attention: it is in no layer that runs alone"):
        overt.trace(Alone(), {"x": torch.randn(1, 3, 8)}, mixing=MIXING)


def test_evolving_layers_cannot_run_alone() -> None:
    model = BY_NAME["BERT"].make()
    overt.attach(model, overt.Evolving())
    with pytest.raises(
        ValueError, match="value zeroing runs each layer alone, and Evolving reads the layer below it"
    ):
        overt.trace(model, tokens(), mixing=MIXING)


def test_a_layer_that_remembers_is_refused() -> None:
    class Remembering(Layer):
        calls = 0

        def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(x, hidden) + 0.1 * self.calls

    network = Network()
    network.layers[1] = Remembering()
    with pytest.raises(ValueError, match=r"layers\.1 gives another output when it is run again"):
        overt.trace(network, {"x": torch.randn(1, 4, 8)}, mixing=MIXING)


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "T5"])
def test_receptive_fields_are_of_what_may_be_seen(name: str) -> None:
    family = BY_NAME[name]
    traced = overt.trace(family.make(), inputs_of(family), mixing=MIXING)
    for method in ("raw", "rollout", "flow"):
        found = traced.read(method, receptive_field=True)
        torch.testing.assert_close(found.sum(dim=-1), torch.ones_like(found.sum(dim=-1)), **NEAR)
        # Uniform attention has the same share of all that it sees.
        flat = replace(
            traced,
            maps=list(traced.levels().uniform().maps),
            encoder_maps=list(traced.levels().uniform().encoder),
            cross=list(traced.levels().uniform().cross),
        )
        rows = flat.read(method, receptive_field=True)
        kept = rows[rows > 0].view(-1)
        assert bool(
            ((kept - 1.0 / (rows > 0).sum(-1, keepdim=True).expand_as(rows)[rows > 0]).abs() < 1e-6).all()
        )


def test_single_heads_have_no_map() -> None:
    with pytest.raises(ValueError, match="heads with mixing='value-zeroing' is not supported"):
        overt.trace(BY_NAME["BERT"].make(), tokens(), mixing=MIXING, heads=True)


@torch.no_grad()
def test_a_layer_whose_batch_is_the_second_axis() -> None:
    torch.manual_seed(0)
    first = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    second = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 3, 8)  # as many tokens as examples: nothing but the setting tells them apart
    one = overt.trace(first, {"src": x}, mixing=MIXING)
    other = overt.trace(second, {"src": x.transpose(0, 1)}, mixing=MIXING)
    torch.testing.assert_close(one.maps[1], other.maps[1], **NEAR)


class Turning(nn.Module):
    """A layer that takes (batch, token, width) around torch's attention, which does not unless it is told."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.norm, self.wide = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: None = None) -> Tensor:
        del hidden
        y = x if self.attention.batch_first else x.transpose(0, 1)
        y = self.attention(y, y, y)[0]
        x = self.norm(x + (y if self.attention.batch_first else y.transpose(0, 1)))
        return x + self.wide(x).relu()


@pytest.mark.parametrize("batch", [2, 4])
def test_a_layer_that_turns_its_axes_for_the_attention(batch: int) -> None:
    x = torch.randn(batch, 4, 8)  # of 4 tokens

    def maps(first: bool, x: Tensor) -> Tensor:
        network = Network()
        network.layers = nn.ModuleList([Turning(first)])
        return overt.trace(network, {"x": x}, mixing=MIXING).maps[0]

    torch.testing.assert_close(maps(True, x), maps(False, x), **NEAR)
    torch.testing.assert_close(maps(False, x)[:1], maps(True, x[:1]), **NEAR)


class Wrapped(nn.Module):
    """What knows nothing of caches, so that the model makes one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids).logits


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_cache_is_left_alone(name: str) -> None:
    model, ids = BY_NAME[name].make(), tokens()
    plain = overt.trace(model, ids, mixing=MIXING).maps
    for other in (Wrapped(model), model):
        inputs = {"input_ids": ids} if other is not model else {"input_ids": ids, "use_cache": True}
        for ours, theirs in zip(overt.trace(other, inputs, mixing=MIXING).maps, plain, strict=True):
            torch.testing.assert_close(ours, theirs, **NEAR)


def test_what_the_model_returns_knows_nothing_of_the_layers_that_ran_again() -> None:
    inputs = {"input_ids": tokens(), "output_hidden_states": True}
    found = []

    def output(given: Any) -> Tensor:
        found.append(len(given.hidden_states))
        return given.hidden_states[2][:, 0]  # type: ignore[no-any-return]

    model = BY_NAME["BERT"].make()
    plain, zeroed = (overt.trace(model, inputs, output=output, mixing=mixing) for mixing in ("norm", MIXING))
    assert torch.equal(plain.outputs, zeroed.outputs)  # type: ignore[arg-type]
    assert set(found) == {len(model.bert.encoder.layer) + 1}


def test_attentions_that_are_the_list_themselves_are_no_layers() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for attention in self.attentions:
                x = x + attention(x, x, x)[0]
            return x

    with pytest.raises(ValueError, match=r"has no map of attentions\.0: it is in no layer that runs alone"):
        overt.trace(Split(), {"x": torch.randn(1, 3, 8)}, mixing=MIXING)


def test_values_that_are_nothing_draw_on_nothing() -> None:
    network = Network().double()
    with torch.no_grad():
        for layer in network.layers:
            assert isinstance(layer, Layer)
            layer.attention.in_proj_weight[16:] = 0.0
            layer.attention.in_proj_bias[16:] = 0.0
    traced = overt.trace(network, {"x": torch.randn(2, 4, 8, dtype=torch.float64)}, mixing=MIXING)
    assert not any(cells.any() for cells in traced.maps)


def test_a_model_that_attends_in_windows_is_refused_as_for_other_graphs() -> None:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    model = hf.SwinModel(hf.SwinConfig(depths=[1, 1], num_heads=[2, 2], **sizes))
    for mixing in ("attention", MIXING):
        with pytest.raises(ValueError, match="models that attend in windows or shrink"):
            overt.trace(model, torch.randn(1, 3, 32, 32), mixing=mixing)
