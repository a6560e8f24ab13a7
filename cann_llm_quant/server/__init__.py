"""Serves one engine over HTTP: OpenAI's completions and chat, `/generate`, health and metrics (extra `serve`).

`app.create_app` makes the ASGI application, `serving.serve` runs it. Nothing is imported here, so that the rest of
the package works where FastAPI is not installed.
"""
