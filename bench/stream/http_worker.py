"""An HTTP worker as sglang's routers expect one, with a mock engine: `python -m bench.stream.http_worker`.

`/generate` streams server-sent events of `--tokens-per-chunk` tokens each, one every `--pace-us`: the routers pass on no field
that they do not know. The ready line on stdout says where it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os

from aiohttp import web

from bench.stream.engines import token_at

ABOUT = {
    "model_path": "mock",
    "served_model_name": "mock",
    "tokenizer_path": "mock",
    "is_generation": True,
    "max_running_requests": 4096,
    "model_type": "deepseek_v3",
}


async def healthy(request: web.Request) -> web.Response:
    """What routers ask from time to time."""
    return web.json_response({"status": "ok"})


async def about(request: web.Request) -> web.Response:
    """The model and the server."""
    return web.json_response(ABOUT)


async def models(request: web.Request) -> web.Response:
    """As OpenAI's list of models."""
    return web.json_response({"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]})


def generator(size: int, pace_s: float):
    """The handler of `/generate`: server-sent events of `size` tokens."""

    async def generate(request: web.Request) -> web.StreamResponse:
        output = int((await request.json())["sampling_params"]["max_new_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for position in range(0, output, size):
            await asyncio.sleep(pace_s)
            ids = [token_at(place) for place in range(position, min(position + size, output))]
            event = {"text": " word" * len(ids), "output_ids": ids, "meta_info": {"id": "0", "finish_reason": None}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return generate


async def main(size: int, pace_s: float) -> None:
    """Serves until it is ended."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # a router tries HTTP/2 first: that is no news
    application = web.Application()
    for path in ("/health", "/health_generate"):
        application.router.add_get(path, healthy)
    for path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
        application.router.add_get(path, about)
    application.router.add_get("/v1/models", models)
    application.router.add_post("/generate", generator(size, pace_s))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    print(json.dumps({"address": f"127.0.0.1:{port}", "pid": os.getpid()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--pace-us", type=int, default=2000)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.tokens_per_chunk, arguments.pace_us / 1e6))
