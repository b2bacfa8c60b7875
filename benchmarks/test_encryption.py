"""Cost of encryption: a step of one trainer and one server, encrypted and not encrypted.

The connection uses TCP, as between hosts, or a Unix socket, which only
`transport_encryption="required"` encrypts. Trainer and server use the same cores.
"""

from __future__ import annotations

import os

import jax
import pytest
from test_endpoints import endpoint_step

from dtrans.protocol.token import new_token


@pytest.mark.parametrize("way", ["TCP", "a Unix socket"])
@pytest.mark.parametrize("parameters", ["10 k", "7.4 M"])
def test_encrypted_step(benchmark, ratio, monkeypatch, tmp_path, parameters, way):
    monkeypatch.setenv("DTRANS_TOKEN", new_token())
    deep = tmp_path / ("d" * 100)  # too long for the path of a Unix socket, so dtrans uses TCP
    deep.mkdir()
    environment = {"TMPDIR": str(deep)} if way == "TCP" else {}
    with (
        endpoint_step(parameters, "sync", 1, "required", **environment) as encrypted,
        endpoint_step(parameters, "sync", 1, "disabled", **environment) as plain,
    ):
        benchmark.pedantic(lambda: jax.block_until_ready(encrypted()), rounds=5, warmup_rounds=3)
        name = (
            f"encrypted step / plain step by {way}, {parameters} parameters (load "
            f"{os.getloadavg()[0]:.1f})"
        )
        benchmark.extra_info["over plain"] = ratio(name, encrypted, plain, 30)
