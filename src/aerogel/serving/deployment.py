"""A saved model on Ray Serve: requests are looked at, put together to a batch, and answered.

Batching, replicas, queues, draining and metrics are Ray Serve's. A call runs beside the replica's loop, so
that health checks and new requests do not wait for it; the health check itself computes.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from aerogel.errors import AerogelError, InvalidArgument, ShapeError
from aerogel.preprocess import Recipe
from aerogel.serving.cluster import cpus
from aerogel.serving.predictor import Predictor, Rows
from aerogel.serving.requests import JSON, MOST_BYTES, Refused, answered, arrays

NAME = "aerogel"
"""Of the application."""
OPTIONS = {"model", "preprocess", "batch", "wait_ms", "max_bytes", "threads", "replicas", "most_replicas"}
"""What the args of `aerogel.ray:app` may say."""
BODY_S, REQUEST_S = 30.0, 120.0
"""Seconds for a request's body, and for all of a request."""


class Model:
    """One replica."""

    def __init__(
        self, path: str, preprocess: str | None, batch: int | None, wait_s: float, max_bytes: int
    ) -> None:
        threads = cpus()
        self._predictor = Predictor(path, threads)
        self._recipe = self._predictor.recipe if preprocess is None else Recipe.parse(preprocess)
        self._most = max_bytes
        self._name = str(serve.get_replica_context().replica_id.unique_id)
        self._beside = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        self._readers = ThreadPoolExecutor(threads)
        self._together.set_max_batch_size(batch or self._predictor.largest)
        self._together.set_batch_wait_timeout_s(wait_s)

    async def __call__(self, request: Request) -> Response:
        try:
            path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
            if request.method == "POST" and path == "/":
                return await self._answer(request)
            if request.method == "GET" and path == "/ready":
                await self.check_health()
                return Response(b'{"ready": true}', media_type=JSON)
            if request.method == "GET" and path == "/":
                return Response(json.dumps(self._described()), media_type=JSON)
            raise Refused(404, "POST / answers, GET / says what it takes, GET /ready computes")
        except Refused as why:
            return Response(json.dumps({"error": str(why)}), why.status, media_type=JSON)

    async def _answer(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._body(request)
        except TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_S:g} s") from None
        loop, kind = asyncio.get_running_loop(), request.headers.get("content-type", "")
        given = await loop.run_in_executor(self._readers, arrays, body, kind, self._predictor, self._recipe)
        found = await self._together(given)
        if isinstance(found, AerogelError):
            raise Refused(400 if isinstance(found, ShapeError) else 413, str(found))
        accept = request.headers.get("accept", "")
        content, media = await loop.run_in_executor(self._readers, answered, found, accept)
        return Response(content, media_type=media, headers={"x-replica": self._name})

    async def _body(self, request: Request) -> bytes:
        """A body that ends before it is too large."""
        said = request.headers.get("content-length", "0")
        if not said.isdigit() or int(said) > self._most:
            raise Refused(413, f"a body has at most {self._most} bytes")
        held = bytearray()
        async for chunk in request.stream():
            held += chunk
            if len(held) > self._most:
                raise Refused(413, f"a body has at most {self._most} bytes")
        return bytes(held)

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=1)  # type: ignore[untyped-decorator]
    async def _together(self, asked: list[Rows]) -> list[Rows | AerogelError]:
        """The requests that came together, beside the loop. Size and wait are those of __init__."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._beside, self._predictor.together, asked)

    async def check_health(self) -> None:
        """The example's answer, computed now, is the one it was."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._beside, self._predictor, self._predictor.example)
        if any(not np.array_equal(found[n], v, equal_nan=True) for n, v in self._predictor.answer.items()):
            raise AerogelError("the model's answer to its example has changed")

    def _described(self) -> dict[str, Any]:
        inputs = {
            name: {
                "sizes": [n if isinstance(n, int) else None for n in sizes],
                "dtype": str(self._predictor.example[name].dtype),
            }
            for name, sizes in self._predictor.inputs.items()
        }
        recipe = None if self._recipe is None else str(self._recipe)
        return {"inputs": inputs, "outputs": list(self._predictor.outputs), "preprocess": recipe}


def application(args: dict[str, Any]) -> Any:
    """The deployment that a config's args ask for."""
    wrong = set(args) - OPTIONS
    if wrong or not isinstance(args.get("model"), str):
        raise InvalidArgument(f"args are {sorted(OPTIONS)}, and model is a path; not {sorted(wrong)}")
    batch = args.get("batch")
    least, most = int(args.get("replicas", 1)), int(args.get("most_replicas", 0))
    waiting = 2 * int(batch or 32)
    scale: dict[str, Any] = {"num_replicas": least}
    if most > least:
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": max(1, waiting // 4),
                "upscale_delay_s": 5,
                "look_back_period_s": 15,
            }
        }
    deployed = serve.deployment(
        Model,
        ray_actor_options={"num_cpus": int(args.get("threads", 1))},
        max_ongoing_requests=waiting,
        max_queued_requests=16 * waiting,
        graceful_shutdown_timeout_s=60,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5,
        health_check_timeout_s=30,
        **scale,
    )
    wait_s = float(args.get("wait_ms", 2.0)) / 1e3
    return deployed.bind(
        args["model"], args.get("preprocess"), batch, wait_s, int(args.get("max_bytes", MOST_BYTES))
    )


def config(args: dict[str, Any], host: str, port: int) -> dict[str, Any]:
    """What `serve deploy` and KubeRay take: the same deployment, in a file."""
    application(args)
    own = {"name": NAME, "route_prefix": "/", "import_path": "aerogel.ray:app", "args": args}
    return {"http_options": http_options(host, port), "applications": [own]}


def http_options(host: str, port: int) -> dict[str, Any]:
    return {"host": host, "port": port, "request_timeout_s": REQUEST_S}
