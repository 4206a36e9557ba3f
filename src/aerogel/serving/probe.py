"""A probe for Triton's server that computes: `/v2/health/ready` stays at 200 when a worker process is dead.

    python -m aerogel.serving.probe http://127.0.0.1:8000 model

Sends the first warm-up request of the model's settings, as zeros. Exit code 0 where it is answered, else 1.
Needs nothing but Python, so that a probe is over in a tenth of a second.
"""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.request
from typing import Any

WAIT_S = 10.0
_BYTES = {
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BOOL": 1,
    "UINT8": 1,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
}


def request(settings: dict[str, Any]) -> tuple[bytes, int]:
    """A body of zeros by the server's binary protocol, and the length of its JSON part."""
    warm = settings["model_warmup"][0]
    inputs, zeros = [], 0
    for name, said in warm["inputs"].items():
        shape, kind = [warm["batch_size"], *map(int, said["dims"])], said["data_type"].removeprefix("TYPE_")
        size = math.prod(shape) * _BYTES[kind]
        parameters = {"binary_data_size": size}
        inputs.append({"name": name, "shape": shape, "datatype": kind, "parameters": parameters})
        zeros += size
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return head + bytes(zeros), len(head)


def probe(server: str, model: str) -> None:
    """Ask once; an exception where there is no answer."""
    url = f"{server.rstrip('/')}/v2/models/{model}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"'{server}' is no http address")
    until = time.monotonic() + WAIT_S
    with urllib.request.urlopen(f"{url}/config", timeout=WAIT_S) as answer:  # noqa: S310
        body, length = request(json.load(answer))
    headers = {"Inference-Header-Content-Length": str(length), "Content-Type": "application/octet-stream"}
    asked = urllib.request.Request(f"{url}/infer", data=body, headers=headers)  # noqa: S310
    left = max(0.1, until - time.monotonic())
    with urllib.request.urlopen(asked, timeout=left) as answer:  # noqa: S310
        answer.read()


if __name__ == "__main__":
    try:
        probe(*sys.argv[1:])
    except Exception as why:
        sys.exit(f"no answer: {type(why).__name__}: {why}")
