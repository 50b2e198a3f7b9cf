"""The forms of attention that are compared on language understanding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import overt
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.synthesizer import Synthesizer
from overt.recipes._rows import settings_of
from overt.recipes.text_training import TextTraining
from overt.recipes.understanding_tables import BAM_TUNED, TUNED, published_as

PLAIN = "plain"


class Knobs(NamedTuple):
    """What differs between tasks.

    Attributes:
        alpha: of Evolving.
        beta: of Evolving.
        k: of Bayesian attention, its smaller values being noisier.
        longest: tokens of the longest text, which a Synthesizer has parameters for.
    """

    alpha: float = 0.1
    beta: float = 0.1
    k: float = 10.0
    longest: int = 128


USUAL = Knobs()


def knobs(task: str, published: str | None, longest: int) -> Knobs:
    """The published settings of a task: Wang et al.'s for their models, Fan et al.'s k for all."""
    tuned = TUNED.get(published or "", {}).get(task)
    bam = BAM_TUNED.get(published_as(task))
    k = USUAL.k if bam is None else bam.k
    if tuned is None:
        return Knobs(k=k, longest=longest)
    return Knobs(tuned.alpha, tuned.beta, k, longest)


def forms(settings: Knobs = USUAL) -> dict[str, tuple[Mechanism, ...]]:
    """Name of a form → its mechanisms, with the settings of a task."""
    alpha, beta, k, longest = settings
    evolving = Evolving(alpha=alpha, beta=beta)
    prior = {"k": k, "prior_beta": 1e-2, "d_mid": 5}
    random = Bayesian(**prior)  # type: ignore[arg-type]
    return {
        PLAIN: (),
        "Evolving": (evolving,),
        "w/o convolution": (Evolving(alpha=alpha, beta=0.0),),
        "w/o skip": (Evolving(alpha=0.0, beta=beta),),
        "1×1": (Evolving(alpha=alpha, beta=beta, kernel_size=1),),
        "5×5": (Evolving(alpha=alpha, beta=beta, kernel_size=5),),
        "RealFormer": (Evolving.realformer(),),
        "Synthesizer random": (Synthesizer("random", longest),),
        "Synthesizer dense": (Synthesizer("dense", longest),),
        "BAM-WC": (random,),
        "BAM-WC weight 1": (Bayesian.paper("WC", **prior),),
        "no KL": (Bayesian.paper("NO KL", k=k),),
        "BAM-WF": (Bayesian.paper("WF", k=k, prior_beta=1e-2),),
        "BAM-LC": (Bayesian.paper("LC", d_mid=5),),
        "BAM-LF": (Bayesian.paper("LF"),),
        "both": (evolving, random),
        "Bayesian k=2": (Bayesian(k=2.0),),
        "Bayesian k=10": (Bayesian(k=10.0),),
    }


@dataclass(frozen=True)
class TextRow:
    """A form of attention on a task.

    Attributes:
        form: its name.
        task: of GLUE, or a version of SQuAD.
        mechanisms: of the form.
        training: settings.
        model: name of the pretrained model.
        data: hash of the task's files.
        share: of the training rows that is held out.
        choosing: whether it only chooses a learning rate, and must not see the development rows.
    """

    form: str
    task: str
    mechanisms: tuple[Mechanism, ...]
    training: TextTraining
    model: str
    data: str
    share: float
    choosing: bool = False

    @property
    def name(self) -> str:
        """In tables and of the folder."""
        name = row_name(self.form, self.task)
        return f"{name}, rate {self.training.learning_rate:g}" if self.choosing else name

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "form": self.form,
            "task": self.task,
            "mechanisms": settings_of(self.mechanisms),
            "training": self.training.settings(),
            "model": self.model,
            "data": self.data,
            "held_out": self.share,
            "choosing": self.choosing,
        }


def row_name(form: str, task: str) -> str:
    """Name of a form on a task."""
    return f"{form}, {task}"


def trained_model(row: TextRow, run: Path, needed_by: str) -> Any:
    """The fine-tuned model of a run, with its mechanisms.

    Args:
        row: form and task.
        run: folder of the run.
        needed_by: what cannot do without it, for the error if it was discarded.
    """
    from transformers import AutoModelForSequenceClassification

    check_kept(row, run, needed_by)
    if row.mechanisms:
        return overt.load(run / "model")
    return AutoModelForSequenceClassification.from_pretrained(run / "model")


def check_kept(row: TextRow, run: Path, needed_by: str) -> None:
    """Refuse the folder of a run whose model was discarded."""
    if not (run / "model" / "config.json").is_file():
        raise FileNotFoundError(
            f"{needed_by} needs the model of {row.name}, and {run / 'model'} has none: ea-table-3 --fresh "
            "trains it again, without --discard-models"
        )
