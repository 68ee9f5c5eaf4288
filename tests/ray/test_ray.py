"""Replicas on Ray Serve: one of them is killed under load, all are replaced under load, and no
request is lost.
"""

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import quire
from quire import LLM, SamplingParams
from quire.model.config import ModelError
from quire.serving.http.settings import ServerSettings
from quire.serving.ray.scale import DeploymentPlan, ReplicaOptions
from quire.tests.support.canary import Client
from quire.tests.support.talk import until

try:
    import ray
except ImportError:
    if os.environ.get("QUIRE_NEEDS_RAY"):
        raise
    pytest.skip("needs the extra quire[ray]", allow_module_level=True)

from ray import serve

from quire.scripts.options import UsageError
from quire.scripts.serve.ray import app
from quire.serving.ray import deploy

FOLDER = str(Path(quire.__file__).parent / "model" / "quill_draft")
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 16 << 20,
}
WORDS = "fox bear lake hat ship moon tree bird king road song fish".split()

pytestmark = pytest.mark.slow


def plan_of(port: int, **scale: Any) -> DeploymentPlan:
    chosen = ReplicaOptions(replica_resources={"CPU": 0.1}, **scale)
    return DeploymentPlan(
        ((FOLDER, ("m",)),),
        ServerSettings(port=port, api_keys=("key",)),
        OPTIONS,
        chosen,
        log_level="warning",
    )


@pytest.fixture(scope="module")
def cluster():
    """Three replicas; (the plan, a way to ask)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan = plan_of(port, replicas=3)
    deploy.connect(None, plan)
    try:
        deploy.run(plan)
        yield plan, Asker(port)
    finally:
        deploy.stop()


class Asker:
    """Clients of the front, and what one engine would have answered."""

    def __init__(self, port: int):
        self.port = port
        self.alone = LLM(FOLDER, **OPTIONS)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", {"Authorization": "Bearer key"}, timeout=900)

    def get(self, path: str) -> Any:
        with self.client() as client:
            status, _, raw = client.ask("GET", path)
        assert status == 200, raw
        return raw.decode() if path == "/metrics" else json.loads(raw)

    def total(self, name: str) -> float:
        """Of a counter, over all replicas."""
        lines = [
            line
            for line in self.get("/metrics").splitlines()
            if line.split("{")[0].split(" ")[0] == name
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def ask(self, body: dict[str, Any], streamed: bool) -> str:
        with self.client() as client:
            if not streamed:
                status, found = client.post("/v1/completions", body)
                assert status == 200, found
                return found["choices"][0]["text"]
            events = [event for _, event in client.events("/v1/completions", body)]
        assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1]), (
            events[-2:]
        )
        assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]].count("length") == 1
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    def expected(self, body: dict[str, Any]) -> str:
        own = {name: value for name, value in body.items() if name not in ("prompt", "stream")}
        [output] = self.alone.generate(
            body["prompt"], SamplingParams.from_dict(own), use_tqdm=False
        )
        return output.outputs[0].text

    def all_answered(self, bodies: list[dict[str, Any]], during: Any) -> None:
        """Eight clients at a time ask, while something happens; every answer is the one of an
        engine alone.
        """
        begun = threading.Semaphore(0)

        def one(item: tuple[int, dict[str, Any]]) -> str:
            begun.release()
            return self.ask(item[1], streamed=item[0] % 3 > 0)

        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(one, enumerate(bodies))
            for _ in range(8):
                begun.acquire()
            during()
            found = list(answers)
        for body, text in zip(bodies, found, strict=True):
            assert text == self.expected(body), body


def bodies(count: int, seed: int, length: int = 350) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randrange(1, 60))),
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": rng.choice((0, 0.8)),
            "seed": rng.randrange(1000),
        }
        for _ in range(count)
    ]


def processes(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ServeReplica:quire:{name}" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_same_server(cluster):
    """All that one process serves, from any of the replicas; keys are asked for at the door."""
    _, asker = cluster
    assert asker.get("/health") == {"status": "ok", "replicas": {"engine": {"RUNNING": 3}}}
    assert [model["id"] for model in asker.get("/v1/models")["data"]] == ["m"]
    assert asker.get("/load") == {"server_load": 0} and asker.get("/ping") == {}
    for path in ("/v1/models", "/metrics", "/load"):
        with Client(f"http://127.0.0.1:{asker.port}") as stranger:
            assert stranger.ask("GET", path)[0] == 401
    with asker.client() as client:
        assert client.post("/v1/completions", {"prompt": ""})[0] == 400
        assert client.ask("GET", "/nothing")[0] == 404
        assert client.ask("POST", "/v1/completions", b"x" * (17 << 20))[0] == 413
        status, headers, _ = client.ask("GET", "/", headers={"X-Request-Id": "mine"})
        assert (
            status == 200
            and headers["X-Request-Id"] == "mine"
            and "Content-Security-Policy" in headers
        )
        turn = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert client.post("/v1/messages", turn)[1]["type"] == "message"


def test_what_serve_deploy_and_rayservice_import(cluster):
    """The words after `quire serve`, as an application."""
    made = app(
        {
            "command": (
                f"{FOLDER} --max-replicas 2 --max-num-seqs 4 --prefill-replicas 1 --api-key 'a b'"
            )
        }
    )
    assert isinstance(made, serve.Application)
    with pytest.raises(UsageError, match="--uds"):
        app({"command": "--uds socket"})


def test_a_client_that_leaves_ends_its_request(cluster):
    _, asker = cluster
    client = asker.client()
    # Eight answers, of which a busy machine does not write the last before it sees that nobody
    # reads.
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
    kind = {"Content-Type": "application/json"}
    client.connection.request("POST", "/v1/completions", json.dumps(body), client.headers | kind)
    client.connection.getresponse().read(10)
    client.connection.close()
    deadline = time.monotonic() + 120
    while asker.total("vllm:num_requests_running") or asker.get("/load")["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert asker.total("vllm:generation_tokens_total") < 8 * 450


def test_a_replica_killed_under_load(cluster):
    """Again, if it had nothing to do just then."""
    _, asker = cluster

    def kill():
        found = processes("engine")
        for process in found:
            process.cpu_percent()
        # an answer has begun
        until(lambda: asker.total("vllm:generation_tokens_total") > told, 300)
        os.kill(max(found, key=psutil.Process.cpu_percent).pid, signal.SIGKILL)

    for number in range(5):
        while (
            asker.get("/health")["replicas"]["engine"] != {"RUNNING": 3}
            or len(processes("engine")) != 3
        ):
            time.sleep(0.2)
        told = asker.total("vllm:generation_tokens_total")
        asker.all_answered(bodies(16, number), kill)
        if asker.total("quire:front_resumed_total"):
            break
    assert asker.total("quire:front_retries_total") >= asker.total("quire:front_resumed_total") >= 1


def test_replaced_under_load(cluster):
    """Another plan takes the place of the first, replica after replica; then one reads and another
    writes.
    """
    plan, asker = cluster
    new = replace(
        plan, scale=ReplicaOptions(replicas=1, prefill_replicas=1, replica_resources={"CPU": 0.1})
    )
    asker.all_answered(bodies(24, 1, 150), lambda: deploy.run(new))
    assert asker.get("/health")["replicas"]["reader"] == {"RUNNING": 1}
    asker.all_answered(bodies(10, 2, 20), lambda: None)
    read = [line for line in asker.get("/metrics").splitlines() if 'model_name="reader"' in line]
    assert any(
        line.startswith("vllm:prompt_tokens_total") and not line.endswith(" 0.0") for line in read
    )
    [reader] = processes("reader")
    asker.all_answered(bodies(8, 3, 20), lambda: os.kill(reader.pid, signal.SIGKILL))


def test_what_does_not_fit_is_told(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **given: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(
        ModelError, match="3 replicas of 1 CPU do not fit: this machine has 2; .* CPU=0.67"
    ):
        deploy.connect(
            None,
            DeploymentPlan(((None, ("m",)),), ServerSettings(), {}, ReplicaOptions(replicas=3)),
        )
