"""Which drafter a draft model is for."""

import json
from pathlib import Path
from typing import Literal

from ..errors import UnsupportedDraftError


def kind_of(draft: Path) -> Literal["block", "small"]:
    """``small`` for a model that can write alone, ``block`` for a DFlash draft.

    The one names its architecture so, or none; the other has settings or an architecture of its
    own. Raises UnsupportedDraftError where there is no config.
    """
    try:
        config = json.loads((draft / "config.json").read_text())
        names = config.get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedDraftError(f"no draft in {draft}: {error}") from error
    if "dflash_config" in config or "speculators_model_type" in config:
        return "block"
    alone = all(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    return "small" if alone else "block"
