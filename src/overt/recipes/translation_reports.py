"""Notes that the recipes of translation share."""

from __future__ import annotations

from overt.recipes._recipe import Outcome
from overt.recipes._row_reports import notes_on_runs
from overt.recipes.translation_training import GREEDY


def text_notes(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data, scores and intervals."""
    config = outcome.config
    data, vocabulary = config["data"], config["vocabulary"]
    entries = [numbers for rows in outcome.per_seed.values() for numbers in rows.values()]
    intervals, runs = notes_on_runs(outcome)
    greedy = [entry["bleu_of_training"] for entry in entries]
    remark = f" ({data['remark']})" if data["remark"] else ""
    return [
        f"Data: {data['name']} {data['direction']}{remark}: {data['train']:,} training pairs, of which "
        f"{config['left_out']} too long or empty were left out, {data['valid']:,} for validation, "
        f"{data['test']:,} for testing. {vocabulary['pieces']:,} BPE pieces ({vocabulary['origin']}, "
        f"{vocabulary['sha256'][:12]}).",
        "BLEU: tokenised text with hyphenated words split, as in Evolving Attention "
        f"({entries[0]['bleu_signature']}); BLEU 13a: detokenised text ({entries[0]['bleu_13a_signature']}).",
        f"{intervals} The bootstrap is sacrebleu's (1,000 samples of the test sentences), one per seed.",
        f"Greedy translations of {GREEDY} training sentences: BLEU {min(greedy):.1f} to {max(greedy):.1f}.",
        runs,
    ]
