"""What "works" means for a model type: what is asked of it with mechanisms attached, and the verdict.

Whatever is asked is asked of the plain model too: where that does not do it either (its cache changes its
outputs, it does not come back from disk), nothing is held against the mechanisms, and a note says so.
"""

from __future__ import annotations

import copy
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

import overt
from zoo.inputs import Recipe, arguments, batch_of, fitting, outputs_of, run, sound_axis
from zoo.models import build
from zoo.settings import BATCH, BOS, EOS, FIRST_WORD, LAST_WORD, PAD, TARGET

WORKS, REFUSED, UNBUILT, WRONG = "works", "refused", "could not be built", "WRONG"
VERDICTS = (WORKS, REFUSED, UNBUILT, WRONG)
TOLERANCE = 2e-4  # of what is the same but for rounding, as a share of the largest output
LARGE = 1e9  # what is larger stands for a mask
STILL = {
    "Evolving at α = β = 0": (overt.Evolving(alpha=0.0, beta=0.0),),
    "Bayesian in evaluation": (overt.Bayesian(),),
}
EVOLVING = overt.Evolving(alpha=0.3, beta=0.3, decoder_alpha=0.3)
LIVE = (EVOLVING, overt.Bayesian())


class Refused(Exception):  # noqa: N818 - a verdict, and no fault
    """The library said that it would not, and why."""

    def __init__(self, reason: str, stage: str) -> None:
        super().__init__(reason)
        self.stage = stage


class Wrong(Exception):  # noqa: N818 - a verdict, too
    """The library did something else than it promises."""


@dataclass
class Case:
    """A type under test.

    Attributes:
        kind: its name.
        plain: the model as transformers builds it.
        recipe: of its inputs.
        notes: what could not be asked, and why.
        padded_rows: whether outputs at padded positions are those of the plain model.
        where: which attentions are attached to.
    """

    kind: str
    plain: Any
    recipe: Recipe
    notes: list[str] = field(default_factory=list)
    padded_rows: dict[str, str] = field(default_factory=dict)
    where: Any = None
    eager: Any = None

    def batch(self, padding: str = "") -> dict[str, Any]:
        return batch_of(self.plain, self.recipe, padding)

    def attached(self, *mechanisms: overt.Mechanism, live: bool = False) -> Any:
        model = copy.deepcopy(self.plain)
        with refusals("attach"):
            overt.attach(model, *mechanisms, where=self.where)
        return enliven(model) if live else model

    def paddings(self) -> list[str]:
        if not self.recipe.masked:
            return [""]
        return ["", "right"] if self.recipe.sound else ["", "right", "left"]


class refusals:  # noqa: N801 - reads as what it does
    """Errors that the library raises on purpose become `Refused`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | RuntimeError | TypeError) and said_by_overt(error):
            raise Refused(line_of(error), self.stage) from error


def said_by_overt(error: BaseException) -> bool:
    """Whether an error was raised by the library's own code, and not by what it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(overt.__file__)
    return bool(frames) and frames[-1].filename.startswith(here) and "raise " in (frames[-1].line or "")


def line_of(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, Refused | Wrong) else text[:400]


def attention_named(model: Any, reason: str) -> str:
    """Class of the attention whose path a reason begins with, or nothing."""
    path = re.split(r"[ :]", reason)[0]
    known = dict(model.named_modules())
    return type(known[path]).__name__ if path in known else ""


def enliven(model: Any) -> Any:
    """Random convolutions that let much through, so that nothing hides behind an identity."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".overt." in name and ".evolving." in name:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(drawn + (0.2 if name.endswith("bias") else 0.0))
    return model


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference as a share of the largest number, infinite where one is not finite alone."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    usual = (a.abs() < LARGE) & (b.abs() < LARGE)
    odd = ~usual
    if bool(odd.any()) and not torch.equal(a[odd].sign().nan_to_num(9.0), b[odd].sign().nan_to_num(9.0)):
        return float("inf")
    if not bool(usual.any()):
        return 0.0
    scale = max(1.0, float(b[usual].abs().max()))
    return float((a[usual] - b[usual]).abs().max()) / scale


@dataclass
class Compared:
    """How far outputs are apart: at real positions, and at padded ones."""

    real: float = 0.0
    padded: float = 0.0
    name: str = ""


def compare(case: Case, ours: dict[str, Tensor], theirs: dict[str, Tensor], padding: str) -> Compared:
    """Outputs held against each other.

    Outputs without an axis of tokens count as real, except under left padding, where many a family pools its
    first position, padding or not.
    """
    result = Compared()
    if ours.keys() != theirs.keys():
        return Compared(float("inf"), 0.0, f"outputs {sorted(ours.keys() ^ theirs.keys())}")
    inputs = case.batch(padding)
    for name in theirs:
        a, b = ours[name], theirs[name]
        real = real_positions(case, inputs, b)
        if real is None or a.shape != b.shape:
            here = distance(a, b)
            real_here, padded_here = (0.0, here) if padding == "left" and case.recipe.text else (here, 0.0)
        else:
            real_here, padded_here = distance(a[real], b[real]), distance(a[~real], b[~real])
        if real_here > result.real or not result.name:
            result.name = name
        result.real, result.padded = max(result.real, real_here), max(result.padded, padded_here)
    return result


def real_positions(case: Case, inputs: dict[str, Any], output: Tensor) -> Tensor | None:
    """True where an output belongs to a real token, (batch, token); None if it has no axis of tokens."""
    if output.dim() < 2 or output.shape[0] != BATCH:
        return None
    tokens = output.shape[1]
    if case.recipe.target and tokens == TARGET:
        mask = inputs.get("decoder_attention_mask")
        return torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    if case.recipe.text and tokens == case.recipe.total() and output.dim() > 2:
        return inputs.get("attention_mask", torch.ones(output.shape[:2])).bool()
    if case.recipe.sound and case.recipe.masked and output.dim() > 2:
        return frames(case.plain, inputs[case.recipe.masked], tokens)
    return None


def frames(model: Any, mask: Tensor, count: int) -> Tensor | None:
    """Which frames of a speech encoder are real, as the family counts them."""
    for module in model.modules():
        for name in ("_get_feature_vector_attention_mask", "_get_output_attention_mask"):
            counting = getattr(module, name, None)
            if counting is None:
                continue
            try:
                made = counting(count, mask) if "vector" in name else counting(mask, count)
            except Exception:
                continue
            if isinstance(made, Tensor) and made.shape == (mask.shape[0], count):
                return made.bool()
    if mask.shape[1] >= count > 0:
        # A family that does not say: frames begin and end where their samples do.
        step = mask.shape[1] / count
        lengths = (mask.sum(1) / step).floor().long()
        return torch.arange(count).view(1, -1) < lengths.view(-1, 1)
    return None


def agreeing(model: Any, inputs: dict[str, Any], stage: str) -> dict[str, Tensor]:
    with refusals(stage):
        return outputs_of(run(model, inputs))


def eager_twin(case: Case) -> Any | None:
    """The plain model with its family's eager attention, whose padded rows may differ from sdpa's."""
    try:
        twin = copy.deepcopy(case.plain)
        twin.set_attn_implementation("eager")
        for module in twin.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config._attn_implementation_internal = "eager"
        run(twin, case.batch())
        return twin
    except Exception:
        return None


def check_identity(case: Case) -> None:
    """Outputs are the plain model's, without padding and with padding on either side."""
    failures = []
    for padding in case.paddings():
        try:
            plain = outputs_of(run(case.plain, case.batch(padding)))
        except Exception as error:
            case.notes.append(f"the plain model takes no {padding} padding: {line_of(error)[:80]}")
            continue
        eager = None if case.eager is None else outputs_of(run(case.eager, case.batch(padding)))
        for name, mechanisms in STILL.items():
            ours = agreeing(case.attached(*mechanisms), case.batch(padding), "first forward")
            to_plain = compare(case, ours, plain, padding)
            to_eager = (
                Compared(float("inf"), float("inf")) if eager is None else compare(case, ours, eager, padding)
            )
            best = min(to_plain, to_eager, key=lambda one: one.real)
            if not best.real <= TOLERANCE:
                shown = f"{padding}-padded " if padding else ""
                failures.append(f"{shown}outputs ({to_plain.name}) move by {to_plain.real:.2g} with {name}")
            if padding:
                as_plain, as_eager = to_plain.padded <= TOLERANCE, to_eager.padded <= TOLERANCE
                said = ("both" if as_eager else "sdpa") if as_plain else "eager" if as_eager else "neither"
                case.padded_rows[f"{padding}, {name.split()[0]}"] = said
                if said == "neither" and to_plain.real <= TOLERANCE:
                    failures.append(f"{padding}-padded rows move with {name}")
                elif said == "neither":
                    case.notes.append("the plain model's sdpa and eager attention differ at real positions")
    if failures:
        raise Wrong("; ".join(failures))


def check_effect(case: Case) -> None:
    """The mechanisms do something."""
    plain = outputs_of(run(case.plain, case.batch()))
    model = case.attached(*LIVE, live=True)
    live = agreeing(model, case.batch(), "first forward")
    if not any(".evolving." in name for name, _ in model.named_parameters()):
        case.notes.append("no two attentions follow each other in this small model")
        return
    if not max((distance(live[name], plain[name]) for name in plain), default=0.0) > 1e-5:
        raise Wrong("mechanisms at α = β = 0.3 change nothing")


def check_leak(case: Case) -> None:
    """A later token moves no earlier output; a padded token moves no real one."""
    model = case.attached(*LIVE, live=True)
    _check_later_tokens(case, model)
    _check_padded_tokens(case, model)


def _check_later_tokens(case: Case, model: Any) -> None:
    """Outputs that a change of the last inputs leaves alone in the plain model are left alone."""
    before = case.batch()
    for name in ("input_ids", "decoder_input_ids", case.recipe.sound):
        if name in before:
            _check_change(case, model, before, {**before, name: changed_at_the_end(before[name])})


def _check_change(case: Case, model: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    def moved(one: Any) -> dict[str, Tensor]:
        first, second = outputs_of(run(one, before)), outputs_of(run(one, after))
        return {
            name: (second[name] - x).abs().flatten(2).amax(dim=(0, 2)) / max(1.0, float(x.abs().max()))
            for name, x in first.items()
            if x.dim() > 2 and x.shape == second[name].shape and x.shape[0] == BATCH
        }

    plain = moved(case.plain)
    with refusals("first forward"):
        ours = moved(model)
    for name, far in plain.items():
        still = far <= 1e-6
        if bool(still.any()) and not bool(still.all()) and not float(ours[name][still].max()) <= 1e-5:
            raise Wrong(
                f"a later input moves earlier outputs ({name}) by {float(ours[name][still].max()):.2g}"
            )


def changed_at_the_end(given: Tensor) -> Tensor:
    """Other words, or another sound, in the last third."""
    changed = given.clone()
    if changed.is_floating_point():
        axis = sound_axis(changed)
        cut = changed.shape[axis] * 2 // 3
        changed.narrow(axis, cut, changed.shape[axis] - cut).neg_()
    else:
        changed[:, -3:] = (changed[:, -3:] + 11) % 40 + FIRST_WORD
    return changed


def _check_padded_tokens(case: Case, model: Any) -> None:
    if "input_ids" not in case.batch() or not case.recipe.masked:
        return
    for padding in ("right", "left"):
        inputs = case.batch(padding)
        hidden = inputs["attention_mask"] == 0
        changed = {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, LAST_WORD - 1)}
        try:
            plain = compare(
                case, outputs_of(run(case.plain, changed)), outputs_of(run(case.plain, inputs)), padding
            )
        except Exception:
            continue
        if not plain.real <= 1e-5:
            case.notes.append(f"{padding}-padded tokens move real outputs of the plain model")
            continue
        after, before = (agreeing(model, each, "first forward") for each in (changed, inputs))
        ours = compare(case, after, before, padding)
        if not ours.real <= 1e-5:
            raise Wrong(f"a {padding}-padded token moves real outputs ({ours.name}) by {ours.real:.2g}")


def generate(case: Case, model: Any, padding: str = "", **settings: Any) -> Any:
    prompt = case.batch(padding)
    prompt = {name: value for name, value in prompt.items() if not name.startswith("decoder")}
    more = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    more |= {"eos_token_id": EOS, "bos_token_id": BOS, "decoder_start_token_id": BOS}
    more |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True, **settings}
    torch.manual_seed(3)
    with torch.no_grad():
        if "GenerationMixin" in type(model).generate.__qualname__:
            return model.generate(**prompt, **more)
        start = {"decoder_input_ids": torch.full((BATCH, 1), BOS)} if model.config.is_encoder_decoder else {}
        return transformers.GenerationMixin.generate(model, **prompt, **start, **more)


def parted(ours: Any, theirs: Any) -> float:
    """How far two generations are apart, up to where their tokens part."""
    if ours.logits is None or len(ours.logits) != len(theirs.logits):
        return float("inf")
    far, prompt = 0.0, theirs.sequences.shape[1] - len(theirs.logits)
    beams = getattr(theirs, "sequences_scores", None)
    if beams is not None:
        return distance(ours.sequences_scores, beams)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        same = (ours.sequences[:, : prompt + step] == theirs.sequences[:, : prompt + step]).all(1)
        far = max(far, distance(a[same], b[same]))
    return far


def check_generation(case: Case) -> None:
    """Cached decoding is uncached decoding, greedy and with beams; Bayesian's is the plain model's."""
    if not getattr(case.plain, "can_generate", lambda: False)():
        return
    more: dict[str, Any] = {}
    honest = False
    for padding in ("left", "") if "left" in case.paddings() else ("",):
        more = {"padding": padding}
        try:
            expected = generate(case, case.plain, use_cache=True, **more)
            honest = parted(generate(case, case.plain, use_cache=False, **more), expected) <= TOLERANCE
        except Exception as error:
            if not padding:
                case.notes.append(f"the plain model does not generate: {line_of(error)[:100]}")
                return
        if honest:
            break
    if not honest:
        case.notes.append("the plain model's cache changes its outputs")
    models = {"Bayesian": case.attached(overt.Bayesian()), "both": case.attached(*LIVE, live=True)}
    with refusals("generation"):
        same = parted(generate(case, models["Bayesian"], use_cache=True, **more), expected)
    if not same <= TOLERANCE:
        raise Wrong(f"cached generation with Bayesian differs from the plain model's by {same:.2g}")
    if not honest:
        with refusals("generation"):
            generate(case, models["both"], use_cache=True, **more)
        return
    for title, beams in (("greedy", 1), ("2 beams", 2)):
        more["num_beams"] = beams
        if beams > 1:
            try:
                slow, fast = (generate(case, case.plain, use_cache=use, **more) for use in (False, True))
                if parted(slow, fast) > TOLERANCE:
                    raise RuntimeError("its cache changes its outputs")
            except Exception as error:
                case.notes.append(f"the plain model has no beam search: {line_of(error)[:100]}")
                continue
        for name, model in models.items():
            with refusals("generation"):
                slow, fast = (generate(case, model, use_cache=use, **more) for use in (False, True))
            if not (far := parted(fast, slow)) <= TOLERANCE:
                raise Wrong(f"cached and uncached generation ({title}, {name}) differ by {far:.2g}")


def labels_for(model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Inputs with labels of the kinds that heads take, then none."""
    out = []
    if "labels" in arguments(model):
        if "decoder_input_ids" in inputs:
            target = inputs["decoder_input_ids"]
            rest = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
            out.append({**rest, "labels": target.masked_fill(target == PAD, -100)})
        if "input_ids" in inputs:
            ids = inputs["input_ids"]
            hidden = (ids == PAD) | (ids > LAST_WORD)
            out.append({**inputs, "labels": ids.masked_fill(hidden, -100)})
        out.append({**inputs, "labels": torch.tensor([0, 1])})
        out.append({**inputs, "labels": torch.tensor([[5, 6, 7], [8, 9, 5]])})
    if "return_loss" in arguments(model):
        out.append({**inputs, "return_loss": True})
    return out


def loss_of(case: Case, model: Any) -> Tensor | None:
    """A loss: the head's own where it has one, else one of all outputs."""
    inputs = case.batch("right" if "right" in case.paddings() else "")
    twin = copy.deepcopy(case.plain).train()
    for given in labels_for(model, inputs):
        torch.manual_seed(5)
        try:
            loss = getattr(twin(**given), "loss", None)
        except Exception:
            continue
        if isinstance(loss, Tensor) and loss.numel() == 1 and bool(loss.isfinite()) and loss.requires_grad:
            torch.manual_seed(5)
            with refusals("training"):
                return model(**given).loss
    try:
        twin(**inputs)
    except Exception as error:
        case.notes.append(f"the plain model does not train on these inputs: {line_of(error)[:100]}")
        return None
    torch.manual_seed(5)
    with refusals("training"):
        output = model(**inputs)
        found = [x for x in tensors(output) if x.requires_grad]
        if not found:
            raise Wrong("no output has a gradient")
        loss = sum(x.clamp(-1e4, 1e4).square().mean() for x in found)
        return loss + overt.penalty(model)


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [x for name, value in output.items() if "past_key" not in str(name) for x in tensors(value)]
    return [x for value in output for x in tensors(value)] if isinstance(output, tuple | list) else []


def check_training(case: Case) -> None:
    """One step has a finite gradient in every parameter of the mechanisms."""
    model = case.attached(*LIVE, live=True)
    ran: set[str] = set()
    for path, module in model.named_modules():
        if path.endswith(".overt") or path == "overt":
            module.register_forward_hook(lambda *_, path=path: ran.add(path))
    model.train()
    loss = loss_of(case, model)
    if loss is None:
        return
    if not bool(loss.isfinite()):
        raise Wrong(f"the training loss is {float(loss)}")
    loss.backward()
    idle = set()
    for name, parameter in model.named_parameters():
        found = re.match(r"(.*?\.?overt)\.", name)
        if found is None:
            continue
        path = found[1]
        attention = model.get_submodule(path.removesuffix("overt").rstrip("."))
        own = [p.grad for n, p in attention.named_parameters() if "overt." not in n]
        unused = bool(own) and all(grad is None or not bool(grad.any()) for grad in own)
        if parameter.grad is None:
            if path not in ran or unused:
                idle.add(path)
                continue
            raise Wrong(f"{name} has no gradient")
        if not bool(parameter.grad.isfinite().all()):
            raise Wrong(f"the gradient of {name} is not finite")
    if idle:
        case.notes.append(f"{len(idle)} attentions have no part in the loss, such as {sorted(idle)[0]}")


def check_saving(case: Case) -> None:
    """What was saved comes back with the same outputs."""
    model = case.attached(*LIVE, live=True)
    inputs = case.batch("right" if "right" in case.paddings() else "")
    before = agreeing(model, inputs, "first forward")
    with TemporaryDirectory() as folder:
        try:
            case.plain.save_pretrained(folder)
            twin = type(case.plain).from_pretrained(folder).eval()
            theirs, own = outputs_of(run(twin, inputs)), outputs_of(run(case.plain, inputs))
            honest = max(distance(theirs[name], own[name]) for name in own) <= TOLERANCE
            reason = "with other outputs"
        except Exception as error:
            honest, reason = False, line_of(error)[:100]
    with TemporaryDirectory() as folder:
        try:
            with refusals("saving"):
                model.save_pretrained(folder)
                loaded = overt.load(folder).eval()
            after = outputs_of(run(loaded, inputs))
            far = max(distance(after[name], before[name]) for name in before)
            failure = (
                "" if far <= TOLERANCE else f"a saved model comes back with outputs that differ by {far:.2g}"
            )
        except Exception as error:
            failure = f"a saved model does not come back: {line_of(error)[:200]}"
    if failure and honest:
        raise Wrong(failure)
    if not honest:
        case.notes.append(f"the plain model does not come back from disk: {reason}")


CHECKS: dict[str, Callable[[Case], None]] = {
    "same outputs": check_identity,
    "effect": check_effect,
    "leak": check_leak,
    "generation": check_generation,
    "training": check_training,
    "save and load": check_saving,
}


def judge(kind: str, tell: Callable[..., None] = lambda *_: None) -> dict[str, Any]:
    """The verdict on a type: a record that JSON can hold.

    `tell` hears which check is at work, and the record where what is left may go wrong without harm.
    """
    record: dict[str, Any] = {"verdict": UNBUILT, "reason": ""}
    tell("build")
    try:
        plain = build(kind)
        record["class"] = type(plain).__name__
        if plain.config.model_type != kind:
            record["type"] = plain.config.model_type
        recipe = fitting(plain)
        record["inputs"] = recipe.name
        case = Case(kind, plain, recipe)
        first, again = (outputs_of(run(plain, case.batch())) for _ in range(2))
        if not first:
            raise ValueError("its outputs hold no numbers to compare")
        if not all(bool((x.abs() < LARGE).any()) for x in first.values()):
            raise ValueError("the plain model's outputs are not finite, or too large to compare")
        if any(distance(again[name], first[name]) > 1e-6 for name in first):
            raise ValueError("the plain model's outputs are random")
        case.eager = eager_twin(case)
    except Exception as error:
        record["reason"] = line_of(error)
        return record
    wrong: list[str] = []
    record["checks"] = {}
    try:
        for name, check in CHECKS.items():
            tell(name)
            try:
                check(case)
                record["checks"][name] = "passed"
            except Refused:
                raise
            except Wrong as error:
                wrong.append(line_of(error))
                record["checks"][name] = line_of(error)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {line_of(error)}")
                record["checks"][name] = wrong[-1]
        record["verdict"], record["reason"] = (WRONG, "; ".join(wrong)) if wrong else (WORKS, "")
        if wrong:
            tell("elsewhere")
            record.update(elsewhere(case))
    except Refused as error:
        record.update(verdict=REFUSED, reason=line_of(error), stage=error.stage)
        if error.stage != "attach":
            record["attention"] = attention_named(plain, line_of(error))
            tell("elsewhere", record)
            record.update(elsewhere(case))
        if wrong:
            record.update(verdict=WRONG, reason="; ".join(wrong))
    record["padded rows"], record["notes"] = case.padded_rows, list(dict.fromkeys(case.notes))
    return record


def elsewhere(case: Case) -> dict[str, Any]:
    """What does work of a type that is refused: Bayesian alone, or all that is asked of some attentions."""
    out: dict[str, Any] = {}
    try:
        for padding in case.paddings():
            ours = outputs_of(run(case.attached(overt.Bayesian()), case.batch(padding)))
            plain = outputs_of(run(case.plain, case.batch(padding)))
            if not compare(case, ours, plain, padding).real <= TOLERANCE:
                raise Wrong
        out["bayesian alone"] = True
    except Exception:
        pass
    for where in ("decoder", "encoder", "cross"):
        part = replace(case, where=where, notes=[], padded_rows={})
        try:
            for check in CHECKS.values():
                check(part)
        except Exception:
            continue
        out.setdefault("where", []).append(where)
    return out
