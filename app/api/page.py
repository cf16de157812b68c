"""``GET /``: the chat page."""

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

router = APIRouter()
CHAT = Path(__file__).parent.parent / "web" / "chat.html"
# Nothing from elsewhere, nothing inline: text of documents and models can run nothing.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@router.get("/", include_in_schema=False)
def chat() -> FileResponse:
    """The chat page, which talks to ``/ask/stream``."""
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return FileResponse(CHAT, media_type="text/html", headers=headers)


@router.get("/favicon.ico", include_in_schema=False)
def favicon() -> Response:
    """Browsers ask for it whatever a page says."""
    return Response(status_code=204)
