"""``GET /health``: whether questions can be answered now."""

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from dflash_engine import hub

from ..service import stand_in
from .deps import CurrentService

router = APIRouter()


class Health(BaseModel):
    """``status`` is ``ready`` with HTTP 200, else 503 with the ``problem`` if it failed."""

    status: Literal["loading", "ready", "failed"]
    name: str
    target: str
    stand_in: bool
    documents: int
    passages: int
    problem: str = ""


@router.get("/health")
def health(service: CurrentService, response: Response) -> Health:
    """Ready only when the models are loaded and the index is open."""
    documents = passages = 0
    if service.state == "ready":
        documents = sum(file.passages > 0 for file in service.index.files())
        passages = service.index.passage_count
    else:
        response.status_code = 503
        response.headers["Retry-After"] = "2"
    return Health(
        status=service.state,
        name=service.settings.name,
        target=hub.short_name(service.settings.target_model),
        stand_in=stand_in(service.settings),
        documents=documents,
        passages=passages,
        problem=service.problem,
    )
