"""Replicas on Ray Serve: no request is lost when one is killed, or all are replaced, under load."""

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


def make_plan(port: int, **scale: Any) -> DeploymentPlan:
    replica_options = ReplicaOptions(replica_resources={"CPU": 0.1}, **scale)
    return DeploymentPlan(
        ((FOLDER, ("m",)),),
        ServerSettings(port=port, api_keys=("key",)),
        OPTIONS,
        replica_options,
        log_level="warning",
    )


@pytest.fixture(scope="module")
def cluster():
    """Three replicas: (their plan, a client of the front)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plan = make_plan(port, replicas=3)
    deploy.connect(None, plan)
    try:
        deploy.run(plan)
        yield plan, FrontClient(port)
    finally:
        deploy.stop()


class FrontClient:
    """Requests to the front, and the expected texts, from a single engine."""

    def __init__(self, port: int):
        self.port = port
        self.single_llm = LLM(FOLDER, **OPTIONS)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", {"Authorization": "Bearer key"}, timeout=900)

    def get(self, path: str) -> Any:
        with self.client() as client:
            status, _, raw = client.ask("GET", path)
        assert status == 200, raw
        return raw.decode() if path == "/metrics" else json.loads(raw)

    def total(self, name: str) -> float:
        """A counter's sum over all replicas."""
        lines = [
            line
            for line in self.get("/metrics").splitlines()
            if line.split("{")[0].split(" ")[0] == name
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def complete(self, body: dict[str, Any], is_streaming: bool) -> str:
        with self.client() as client:
            if not is_streaming:
                status, response = client.post("/v1/completions", body)
                assert status == 200, response
                return response["choices"][0]["text"]
            events = [event for _, event in client.events("/v1/completions", body)]
        assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1]), (
            events[-2:]
        )
        assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]].count("length") == 1
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    def expected_text(self, body: dict[str, Any]) -> str:
        sampling_fields = {
            name: value for name, value in body.items() if name not in ("prompt", "stream")
        }
        [output] = self.single_llm.generate(
            body["prompt"], SamplingParams.from_dict(sampling_fields), use_tqdm=False
        )
        return output.outputs[0].text

    def check_answers_during(self, bodies: list[dict[str, Any]], during: Any) -> None:
        """Send the bodies with eight concurrent clients during an event; check every text."""
        started = threading.Semaphore(0)

        def complete(item: tuple[int, dict[str, Any]]) -> str:
            started.release()
            return self.complete(item[1], is_streaming=item[0] % 3 > 0)

        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(complete, enumerate(bodies))
            for _ in range(8):
                started.acquire()
            during()
            texts = list(answers)
        for body, text in zip(bodies, texts, strict=True):
            assert text == self.expected_text(body), body


def random_bodies(count: int, seed: int, length: int = 350) -> list[dict[str, Any]]:
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


def replica_processes(name: str) -> list[psutil.Process]:
    replicas = []
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ServeReplica:quire:{name}" in " ".join(process.cmdline()):
                replicas.append(process)
        except psutil.Error:
            continue
    return replicas


def test_ray_front_serves_the_same_endpoints(cluster):
    """All endpoints of one process work through the front, which checks API keys."""
    _, front = cluster
    assert front.get("/health") == {"status": "ok", "replicas": {"engine": {"RUNNING": 3}}}
    assert [model["id"] for model in front.get("/v1/models")["data"]] == ["m"]
    assert front.get("/load") == {"server_load": 0} and front.get("/ping") == {}
    for path in ("/v1/models", "/metrics", "/load"):
        with Client(f"http://127.0.0.1:{front.port}") as stranger:
            assert stranger.ask("GET", path)[0] == 401
    with front.client() as client:
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


def test_application_from_serve_command(cluster):
    """The arguments of `quire serve`, as a Ray Serve application."""
    application = app(
        {
            "command": (
                f"{FOLDER} --max-replicas 2 --max-num-seqs 4 --prefill-replicas 1 --api-key 'a b'"
            )
        }
    )
    assert isinstance(application, serve.Application)
    with pytest.raises(UsageError, match="--uds"):
        app({"command": "--uds socket"})


def test_disconnected_client_aborts_its_request(cluster):
    _, front = cluster
    client = front.client()
    # Eight choices: even a busy machine notices the disconnection before it has generated all.
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
    content_type = {"Content-Type": "application/json"}
    client.connection.request(
        "POST", "/v1/completions", json.dumps(body), client.headers | content_type
    )
    client.connection.getresponse().read(10)
    client.connection.close()
    deadline = time.monotonic() + 120
    while front.total("vllm:num_requests_running") or front.get("/load")["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert front.total("vllm:generation_tokens_total") < 8 * 450


def test_killed_replica_loses_no_request(cluster):
    """Repeated if the killed replica had no request at that moment."""
    _, front = cluster

    def kill():
        replicas = replica_processes("engine")
        for process in replicas:
            process.cpu_percent()
        # wait until tokens are generated
        until(lambda: front.total("vllm:generation_tokens_total") > num_tokens_before, 300)
        os.kill(max(replicas, key=psutil.Process.cpu_percent).pid, signal.SIGKILL)

    for number in range(5):
        while (
            front.get("/health")["replicas"]["engine"] != {"RUNNING": 3}
            or len(replica_processes("engine")) != 3
        ):
            time.sleep(0.2)
        num_tokens_before = front.total("vllm:generation_tokens_total")
        front.check_answers_during(random_bodies(16, number), kill)
        if front.total("quire:front_resumed_total"):
            break
    assert front.total("quire:front_retries_total") >= front.total("quire:front_resumed_total") >= 1


def test_rolling_replacement_loses_no_request(cluster):
    """A new plan replaces the replicas one by one; then a prefill replica reads prompts for
    another.
    """
    plan, front = cluster
    new_plan = replace(
        plan, scale=ReplicaOptions(replicas=1, prefill_replicas=1, replica_resources={"CPU": 0.1})
    )
    front.check_answers_during(random_bodies(24, 1, 150), lambda: deploy.run(new_plan))
    assert front.get("/health")["replicas"]["reader"] == {"RUNNING": 1}
    front.check_answers_during(random_bodies(10, 2, 20), lambda: None)
    reader_metrics = [
        line for line in front.get("/metrics").splitlines() if 'model_name="reader"' in line
    ]
    assert any(
        line.startswith("vllm:prompt_tokens_total") and not line.endswith(" 0.0")
        for line in reader_metrics
    )
    [reader] = replica_processes("reader")
    front.check_answers_during(random_bodies(8, 3, 20), lambda: os.kill(reader.pid, signal.SIGKILL))


def test_replicas_that_do_not_fit_are_rejected(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(
        ModelError, match="3 replicas of 1 CPU do not fit: this machine has 2; .* CPU=0.67"
    ):
        deploy.connect(
            None,
            DeploymentPlan(((None, ("m",)),), ServerSettings(), {}, ReplicaOptions(replicas=3)),
        )
