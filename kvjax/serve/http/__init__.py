"""The HTTP server: OpenAI's endpoints over the engine. starlette and uvicorn come with the extra `serve`."""

from __future__ import annotations
