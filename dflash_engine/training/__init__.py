"""Making a DFlash draft for a target of your own, from answers it has written.

>>> data = SequenceFile(Path("answers.jsonl"), key := hub.identity(folder))
>>> training, held_out = split(data)
>>> train(target, key, design(folder, target), training, held_out, Path("run"))
>>> export(Path("run"), Path("my-draft"))
"""

from .design import design, design_of
from .export import export
from .held_out import HeldOut
from .loop import Outcome, Progress, train
from .loss import Loss
from .recipe import Limits, Recipe
from .sequences import Sequence, SequenceFile, split

__all__ = [
    "HeldOut",
    "Limits",
    "Loss",
    "Outcome",
    "Progress",
    "Recipe",
    "Sequence",
    "SequenceFile",
    "design",
    "design_of",
    "export",
    "split",
    "train",
]
