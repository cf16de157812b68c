"""What routes need, as annotated arguments."""

import secrets
from typing import Annotated

from fastapi import Depends, Header, Request

from ..errors import NotAllowedError
from ..rag.answer import Answerer
from ..service import Service


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _answerer(service: Annotated[Service, Depends(_service)]) -> Answerer:
    return service.answerer


def _owner(request: Request, authorization: Annotated[str, Header()] = "") -> None:
    token = str(request.app.state.token)
    if not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise NotAllowedError("this is for the owner of the machine: run 'dflash-rag ingest' there")


CurrentService = Annotated[Service, Depends(_service)]
CurrentAnswerer = Annotated[Answerer, Depends(_answerer)]
OwnerOnly = Depends(_owner)
