"""What the deployment files promise: confined, with probes that exist, grace that suffices and
flags that are there.
"""

import fnmatch
import importlib
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import quire
from quire.__main__ import COMMANDS, app
from quire.ops.native import build
from quire.tests.support.violations import require_none

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCS = ROOT / "docs" / "deploy.md"
SCALE_OUT = ROOT / "docs" / "scale-out.md"
OPEN = {"/health", "/ping"}  # paths that are answered without a key
PATHS = OPEN | {"/metrics"}
USER = 10001
WRITABLE = {"/cache", "/tmp"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MANIFESTS = {
    path: found
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    for found in [yaml.safe_load(path.read_text())]
    if found["kind"] not in ("Kustomization", "Component")
}


OTHERS = {"ray", "hosts"}  # folders for more than one process a model, which stand for themselves


def manifest(kind: str, folder: str | None = None) -> dict[str, Any]:
    chosen = {path: path.parent.name for path in MANIFESTS}
    [found] = [
        found
        for path, found in MANIFESTS.items()
        if found["kind"] == kind
        and (chosen[path] == folder if folder else chosen[path] not in OTHERS)
    ]
    return found


POD = manifest("Deployment")["spec"]["template"]
[SERVER] = POD["spec"]["containers"]
KUSTOMIZATIONS = {
    path.parent.name: yaml.safe_load(path.read_text())
    for path in KUBERNETES.rglob("kustomization.yaml")
}
GPU = yaml.safe_load(KUSTOMIZATIONS["gpu"]["patches"][0]["patch"])
[GPU_SERVER] = GPU["spec"]["template"]["spec"]["containers"]
RAY = manifest("RayService", "ray")["spec"]
CLUSTER = RAY["rayClusterConfig"]
SERVED = yaml.safe_load(RAY["serveConfigV2"])
[RAY_APP] = SERVED["applications"]
RAY_ARGS = shlex.split(RAY_APP["args"]["command"])
HOSTS = manifest("LeaderWorkerSet", "hosts")["spec"]["leaderWorkerTemplate"]
LEADER = HOSTS["leaderTemplate"]["spec"]
WORKER = HOSTS["workerTemplate"]["spec"]
RAY_PODS = [
    own["template"]["spec"] for own in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])
]


def instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of a Dockerfile, lines that go on joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())
    ]


DOCKERFILE = instructions((DEPLOY / "Dockerfile").read_text())
FINAL = DOCKERFILE[max(index for index, (word, _) in enumerate(DOCKERFILE) if word == "FROM") :]


def said(word: str, among: list[tuple[str, str]] = FINAL) -> list[str]:
    return [rest for name, rest in among if name == word]


def unit(text: str) -> dict[str, list[tuple[str, str]]]:
    """The settings of each section of a unit file; anything that systemd would skip is an error."""
    sections: dict[str, list[tuple[str, str]]] = {}
    section: list[tuple[str, str]] | None = None
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"\[(\w+)\]", line):
            assert match[1] not in sections
            section = sections[match[1]] = []
            continue
        match = re.fullmatch(r"([A-Z]\w+)=(.*)", line)
        assert match and section is not None, line
        assert match[2] == match[2].strip() and not match[2].endswith("\\"), line
        section.append((match[1], match[2]))
    return sections


UNIT_TEXT = (DEPLOY / "quire.service").read_text()
UNIT = unit(UNIT_TEXT)
SERVICE = dict(UNIT["Service"])


def blocks(text: str) -> Iterator[str]:
    """The fenced blocks of a page, lines that go on joined."""
    for found in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S):
        yield re.sub(r"\\\n\s*", "", found)


def arguments_of(command: str) -> list[str]:
    """What stands after `quire serve`, or after the image's name in `docker run`."""
    words = shlex.split(command, comments=True)
    start = (
        words.index("serve")
        if "serve" in words
        else next(n for n, word in enumerate(words) if "quire:" in word)
    )
    return words[start + 1 :]


def used_flags() -> dict[str, set[str]]:
    """The flags of `quire serve` that each file uses or names."""
    page = DOCS.read_text()
    runs = [
        line
        for block in blocks(page)
        for line in block.splitlines()
        if re.search(r"docker run|quire serve", line)
    ]
    own = [
        line.partition("=")[2]
        for block in blocks(page)
        for line in block.splitlines()
        if "SERVE_ARGS=" in line
    ]
    found = {
        "Dockerfile": json.loads(said("ENTRYPOINT")[0]),
        "quire.service": arguments_of(SERVICE["ExecStart"]),
        "base": SERVER["args"],
        "gpu": GPU_SERVER["args"],
        "ray": RAY_ARGS,
        "docs": [
            *(word for run in runs for word in arguments_of(run)),
            *shlex.split(" ".join(own)),
        ],
        "docs, the words": re.findall(r"`(--[^`]+)`", page),
        "scale-out": re.findall(r"--[a-z][a-z-]+", SCALE_OUT.read_text()),
        "comments": re.findall(r"--[a-z][a-z-]+", "".join(re.findall(r"# .*", all_text()))),
    }
    others = {"--now", "--build-arg", "--gpus", "--stop-timeout"}  # systemctl's and docker's
    return {
        name: {re.split("[ =]", word)[0] for word in words if word.startswith("--")} - others
        for name, words in found.items()
    }


def all_text() -> str:
    paths = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"]
    return "\n".join(path.read_text() for path in paths)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def grace(arguments: list[str]) -> float:
    """What --shutdown-grace says."""
    text = " ".join(arguments)
    match = re.search(r"--shutdown-grace[ =](\d+)", text)
    assert match, "the grace must be said where something else depends on it"
    return float(match[1])


def serve_options() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, "serve")
    return {
        name: option for option in command.params for name in (*option.opts, *option.secondary_opts)
    }


@pytest.mark.skipif("serve" not in COMMANDS, reason="there is no server yet")
def test_every_flag_is_an_option_of_serve():
    flags_by_file = used_flags()
    options = set(serve_options())
    assert all(flags_by_file.values()), flags_by_file
    require_none(
        (
            f"{name}: {flag}"
            for name, flags in flags_by_file.items()
            for flag in sorted(flags - options)
        ),
        "`quire serve` has no such options:",
    )


@pytest.mark.skipif("serve" not in COMMANDS, reason="there is no server yet")
def test_what_the_files_and_the_page_say_of_defaults():
    options = serve_options()
    assert options["--shutdown-grace"].default == 30 and options["--port"].default == 8000
    for flag, value in re.findall(r"^\| `(--[a-z-]+)` \| (\d+)", DOCS.read_text(), re.M):
        default = options[flag].default
        assert int(value) in (default, default / 2**20), flag


# Kubernetes


def test_every_manifest_is_listed():
    for path in MANIFESTS:
        assert path.name in KUSTOMIZATIONS[path.parent.name]["resources"], path
    for folder, found in KUSTOMIZATIONS.items():
        for resource in found["resources"]:
            assert (KUBERNETES / folder / resource).exists()
    assert all("namespace" not in found["metadata"] for found in MANIFESTS.values())


def test_the_pod_is_confined():
    spec = POD["spec"]
    every = spec["securityContext"]
    assert every["runAsNonRoot"] is True and every["seccompProfile"] == {"type": "RuntimeDefault"}
    assert every["runAsUser"] == every["runAsGroup"] == every["fsGroup"] == USER
    assert every["fsGroupChangePolicy"] == "OnRootMismatch"
    own = SERVER["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert not any("hostPath" in volume for volume in spec["volumes"])
    assert not {"securityContext", "volumes"} & set(GPU["spec"]["template"]["spec"]) | {
        "securityContext"
    } & set(GPU_SERVER)


def test_volumes_are_mounted_where_something_is_written():
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["name"]: mount for mount in SERVER["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert {
        mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")
    } == WRITABLE
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["tmp"]["emptyDir"]["sizeLimit"]


def test_keys_come_from_a_secret_as_a_file():
    [volume] = [volume["secret"] for volume in POD["spec"]["volumes"] if "secret" in volume]
    [mount] = [mount for mount in SERVER["volumeMounts"] if mount["name"] == "keys"]
    [item] = volume["items"]
    assert volume["defaultMode"] == 0o440
    for server in (SERVER, GPU_SERVER):
        assert f"--api-key-file={mount['mountPath']}/{item['path']}" in server["args"]
        assert not any(word.startswith("--api-key=") for word in server["args"])
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    sent = endpoint["authorization"]["credentials"]
    assert sent["name"] == volume["secretName"] and sent["key"] != item["key"]
    [created] = re.findall(
        r"kubectl create secret generic (\S+) (.*?)\nkubectl", DOCS.read_text(), re.S
    )
    assert created[0] == volume["secretName"]
    assert set(re.findall(r"--from-literal=(\w+)=", created[1])) == {item["key"], sent["key"]}
    assert "Secret" not in {found["kind"] for found in MANIFESTS.values()}, (
        "a key does not belong into a repository"
    )


@pytest.mark.parametrize("server", [SERVER, GPU_SERVER], ids=["cpu", "gpu"])
def test_requests_are_limits_and_whole_cores(server):
    resources = server["resources"]
    assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= set(
        resources["limits"]
    )
    assert resources["limits"]["cpu"].isdigit()
    [threads] = [env for env in SERVER["env"] if env["name"] == "PJRT_NPROC"]
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"


def test_a_container_is_told_how_large_its_cache_is():
    assert any(word.startswith("--kv-cache-memory-bytes=") for word in SERVER["args"])
    name, share = next(word.split("=") for word in GPU_SERVER["args"] if "memory" in word)
    assert name == "--gpu-memory-utilization" and 0.75 < float(share) < 1
    assert "nvidia.com/gpu" in GPU_SERVER["resources"]["limits"]


def test_probes_ask_what_is_open():
    ports = {port["name"] for port in SERVER["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = SERVER[kind]["httpGet"]
        assert asked["path"] in OPEN and asked["port"] in ports
    for path, found in MANIFESTS.items():
        for said_path in re.findall(r"path: (/\S+)", path.read_text()):
            # Ray's own
            known = said_path in PATHS or (found["kind"], said_path) == ("RayService", "/-/healthz")
            assert known or found["kind"] == "Deployment", f"{path}: {said_path}"


def test_probes_wait_in_the_right_order():
    def patience(kind: str) -> float:
        return SERVER[kind]["periodSeconds"] * SERVER[kind]["failureThreshold"]

    assert patience("startupProbe") == 1800
    assert manifest("Deployment")["spec"]["progressDeadlineSeconds"] > patience("startupProbe")
    stall = 30
    assert patience("readinessProbe") < stall < patience("livenessProbe")
    assert patience("livenessProbe") > 4 * patience("readinessProbe"), (
        "a restart is the last resort"
    )


@pytest.mark.parametrize("server", [SERVER, GPU_SERVER], ids=["cpu", "gpu"])
def test_grace_of_a_pod(server):
    [word, pause] = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    assert POD["spec"]["terminationGracePeriodSeconds"] >= int(pause) + grace(server["args"]) + 10
    readiness = SERVER["readinessProbe"]
    assert int(pause) >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_labels_select_the_pod():
    labels = POD["metadata"]["labels"]
    selected = [
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        manifest("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        manifest("PodMonitor")["spec"]["selector"]["matchLabels"],
        *(
            spread["labelSelector"]["matchLabels"]
            for spread in POD["spec"]["topologySpreadConstraints"]
        ),
    ]
    assert all(own and own.items() <= labels.items() for own in selected)
    name = manifest("Deployment")["metadata"]["name"]
    assert (
        manifest("ScaledObject")["spec"]["scaleTargetRef"]["name"]
        == name
        == GPU["metadata"]["name"]
    )


def test_ports_are_those_of_the_server():
    [port] = SERVER["ports"]
    assert port["containerPort"] == int(said("EXPOSE")[0]) == 8000
    names = [own["targetPort"] for own in manifest("Service")["spec"]["ports"]]
    names += [own["port"] for own in manifest("PodMonitor")["spec"]["podMetricsEndpoints"]]
    names += [
        own["port"]
        for rule in manifest("NetworkPolicy")["spec"]["ingress"]
        for own in rule["ports"]
    ]
    assert set(names) == {port["name"]}


def test_the_network_is_closed_to_the_inside():
    spec = manifest("NetworkPolicy")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    for rule in spec["egress"]:
        assert rule["to"] and {own["port"] for own in rule["ports"]} in ({53}, {443})
    blocks = [to["ipBlock"] for rule in spec["egress"] for to in rule["to"] if "ipBlock" in to]
    assert {"169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(
        blocks[0]["except"]
    )


def test_a_node_can_be_emptied():
    budget = manifest("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1 and "minAvailable" not in budget


def test_scaling_asks_for_metrics_that_exist():
    spec = manifest("ScaledObject")["spec"]
    [trigger] = spec["triggers"]
    asked = re.findall(r"vllm:(\w+)", trigger["metadata"]["query"])
    assert "num_requests_waiting" in asked
    source = "".join(path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    named = asked + re.findall(r"`(?:vllm|quire):(\w+)`", DOCS.read_text())
    assert [name for name in named if not re.search(rf"\b{name}\b", source)] == []
    assert (
        int(trigger["metadata"]["threshold"]) < 32
        and 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    )
    assert {"op": "remove", "path": "/spec/replicas"} in yaml.safe_load(
        KUSTOMIZATIONS["autoscaling"]["patches"][0]["patch"]
    )


@pytest.mark.parametrize(
    "pod", [*RAY_PODS, LEADER, WORKER], ids=["head", "ray", "leader", "worker"]
)
def test_pods_of_several_are_confined_alike(pod):
    assert (
        pod["securityContext"] == POD["spec"]["securityContext"]
        and pod["enableServiceLinks"] is False
    )
    [container] = pod["containers"]
    assert container["securityContext"] == SERVER["securityContext"]
    assert container["image"] == SERVER["image"] and "command" not in container
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and resources["limits"]["cpu"].isdigit()
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert {own["mountPath"] for own in mounts.values() if not own.get("readOnly")} == WRITABLE | {
        "/dev/shm"
    }
    assert volumes["keys"] == next(own for own in POD["spec"]["volumes"] if own["name"] == "keys")


def test_replicas_fit_into_their_pods():
    """What a replica takes is what a pod has, and there are pods for as many as there may be."""
    options = parsed(RAY_ARGS)
    [group] = CLUSTER["workerGroupSpecs"]
    [worker] = group["template"]["spec"]["containers"]
    assert options["replica_resources"] == {"CPU": float(worker["resources"]["limits"]["cpu"])}
    assert (group["minReplicas"], group["maxReplicas"]) == (
        options["min_replicas"],
        options["max_replicas"],
    )
    assert (
        group["template"]["spec"]["terminationGracePeriodSeconds"] > options["shutdown_grace"] + 10
    )
    assert (
        str(options["api_key_file"]) == "/run/secrets/quire/keys"
        and CLUSTER["enableInTreeAutoscaling"] is True
    )
    assert (
        SERVED["http_options"] == {"host": "0.0.0.0", "port": 8000} and options["host"] == "0.0.0.0"
    )
    [head] = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"]
    for container in (head, worker):
        assert {"name": "serve", "containerPort": 8000} in container["ports"]
    assert worker["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What `quire serve` makes of these; a flag that is none is an error."""
    group: Any = typer.main.get_command(app)
    return group.get_command(None, "serve").make_context("serve", list(arguments)).params


def test_ray_knows_the_fields_and_the_application():
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(SERVED)
    ray_version = importlib.metadata.version("ray")
    [wanted] = PROJECT["project"]["optional-dependencies"]["ray"]
    assert f">={CLUSTER['rayVersion'].rpartition('.')[0]}" in wanted and ray_version
    module, _, name = RAY_APP["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_one_service_for_the_leaders():
    [port] = manifest("Service", "hosts")["spec"]["ports"]
    [leader], [worker] = LEADER["containers"], WORKER["containers"]
    assert leader["ports"] == [{"name": port["targetPort"], "containerPort": 8000}]
    name = manifest("LeaderWorkerSet", "hosts")["metadata"]["name"]
    selected = manifest("Service", "hosts")["spec"]["selector"]
    assert selected == {
        "leaderworkerset.sigs.k8s.io/name": name, "leaderworkerset.sigs.k8s.io/worker-index": "0"
    }  # fmt: skip
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[probe] == SERVER[probe] and probe not in worker
    assert (
        leader["args"] == worker["args"] and HOSTS["restartPolicy"] == "RecreateGroupOnPodRestart"
    )
    [gpus] = [word for word in leader["args"] if word.startswith("--tensor-parallel-size=")]
    assert int(gpus.partition("=")[2]) == HOSTS["size"] * int(
        leader["resources"]["limits"]["nvidia.com/gpu"]
    )


@pytest.mark.skipif(
    "--coordinator-address" not in serve_options(), reason="one process serves a model here"
)
def test_hosts_find_each_other():
    [container] = LEADER["containers"]
    given = {
        "LWS_LEADER_ADDRESS": "quire-hosts-0.quire-hosts.default",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    }
    options = parsed(
        [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], word) for word in container["args"]]
    )
    assert (options["num_processes"], options["process_id"]) == (HOSTS["size"], 1)
    assert options["coordinator_address"] == f"{given['LWS_LEADER_ADDRESS']}:1234"


def test_images_are_pinned():
    for folder in ("base", "gpu", "ray", "hosts"):
        [image] = KUSTOMIZATIONS[folder]["images"]
        assert image["name"] == SERVER["image"]
        assert image["newTag"].split("-")[0] == quire.__version__
    text = all_text() + DOCS.read_text()
    assert not re.search(r":latest\b", text)
    assert set(re.findall(r"quire:(\d[\w.]*)", text)) == {quire.__version__}
    [base] = [rest for rest in said("ARG", DOCKERFILE) if rest.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=python:3\.1[2-9]-slim-\w+", base)
    assert all(rest.split()[0] == "${PYTHON}" for rest in said("FROM", DOCKERFILE))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds(tmp_path):
    def built(folder: Path) -> list[dict[str, Any]]:
        run = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return list(yaml.safe_load_all(run.stdout))

    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    every = {
        "resources": ["kubernetes/gpu"],
        "components": ["kubernetes/monitoring", "kubernetes/autoscaling"],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(every))
    found = {own["kind"]: own for own in built(tmp_path)}
    assert set(found) == {
        own["kind"] for path, own in MANIFESTS.items() if path.parent.name not in OTHERS
    }
    for folder in OTHERS:
        assert built(KUBERNETES / folder)
    spec = found["Deployment"]["spec"]
    assert "replicas" not in spec
    [server] = spec["template"]["spec"]["containers"]
    assert (
        server["image"] == f"quire:{quire.__version__}-cuda13"
        and server["args"] == GPU_SERVER["args"]
    )
    assert (
        server["securityContext"] == SERVER["securityContext"]
        and server["livenessProbe"] == SERVER["livenessProbe"]
    )
    assert {env["name"] for env in server["env"]} == {"PJRT_NPROC"}
    assert manifest("Deployment")["spec"]["replicas"] == 1


# The image


def test_the_image_runs_as_a_user_and_starts_the_server():
    [user], [stop], [entry] = said("USER"), said("STOPSIGNAL"), said("ENTRYPOINT")
    assert user == f"{USER}:{USER}" and stop == "SIGTERM"
    assert json.loads(entry) == ["quire", "serve", "--host", "0.0.0.0"]
    assert any(f"--uid {USER}" in run for run in said("RUN"))
    assert said("VOLUME") == ["/cache"]
    words = [word for word, _ in FINAL]
    assert words.index("USER") > max(
        index for index, word in enumerate(words) if word in ("RUN", "COPY")
    )


def test_the_image_has_no_compiler_and_no_index():
    assert not any(re.search(r"apt|g\+\+|pip|curl", run) for run in said("RUN"))
    assert said("COPY") == ["--from=build /opt/quire /opt/quire"]
    assert "ADD" not in {word for word, _ in DOCKERFILE}


def test_what_is_written_goes_where_it_may():
    [settings] = said("ENV")
    found = dict(part.split("=", 1) for part in settings.split())
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert any(
            found[name] == place or found[name].startswith(f"{place}/") for place in WRITABLE
        )
    assert found["QUIRE_KERNELS"] in " ".join(said("RUN", DOCKERFILE))


def test_kernels_are_built_for_every_processor():
    [run] = [run for run in said("RUN", DOCKERFILE) if "build-kernels" in run]
    assert re.findall(r"--isa (\S+?)[\s;]", run) == [
        isa for isa in build.ISAS["x86_64"] if "emulated" not in isa
    ]
    assert "chmod -R go+rX" in run, "build-kernels makes folders for their owner alone"


def test_libraries_are_those_of_the_project(tmp_path):
    """The line that the image installs from, run."""
    [run] = [run for run in said("RUN", DOCKERFILE) if "tomllib" in run]
    [code] = re.findall(r'python -c "(.*?)" >', run)
    extras = PROJECT["project"]["optional-dependencies"]
    for ray, cuda, names in (
        ("", "", ["otel"]),
        ("ray", "", ["otel", "ray"]),
        ("", "13", ["otel", "cuda"]),
        ("ray", "12", ["otel", "ray", "cuda12"]),
    ):
        # as the shell puts them in
        command = [sys.executable, "-c", code.replace("$RAY", ray).replace("$CUDA", cuda)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        own = [requirement for name in names for requirement in extras[name]]
        assert done.stdout.splitlines() == [*PROJECT["project"]["dependencies"], *own]
    command[-1] = code.replace("$RAY", "").replace("$CUDA", "11")
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode, (
        "no extra is for CUDA 11"
    )


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out: the last line that matches it or a folder above it
    decides.
    """
    parts = Path(path).parts
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            names = [pattern, pattern.removeprefix("**/")]
            if any(
                fnmatch.fnmatchcase(own, name) and own.count("/") >= name.count("/")
                for own in above
                for name in names
            ):
                out = not line.startswith("!")
    return out


def test_the_context_is_what_the_wheel_is_made_of():
    packages = {
        name.replace("quire", ".", 1).replace("..", "./")
        for name in PROJECT["tool"]["setuptools"]["packages"]
    }
    folders = {
        package.removeprefix("./").replace(".", "/", 1).split("/")[0] for package in packages
    } - {""}
    needed = {
        "pyproject.toml",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
        "py.typed",
    }
    needed |= {path.name for path in ROOT.glob("*.py")}
    needed |= {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(needed) > 100
    assert [path for path in sorted(needed) if ignored(path)] == []
    for path in (
        ".git/config",
        "tests/scripts/test_deploy.py",
        "docs/deploy.md",
        "deploy/Dockerfile",
        ".venv/bin/python",
        ".env",
    ):
        assert ignored(path), path
    assert ignored("ops/__pycache__/norm.cpython-312.pyc")
    for sources in said("COPY", DOCKERFILE):
        if not sources.startswith("--from"):
            *names, _ = sources.split()
            assert all(
                (ROOT / name).exists() and (name == "." or not ignored(name)) for name in names
            )


@pytest.mark.parametrize(
    "status, healthy", [(200, True), (503, False), (401, False), (None, False)]
)
def test_the_health_check_itself(status, healthy):
    """The code of the image's health check against a server that answers so, or against none."""
    [check] = said("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        port = server.server_port
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.handle_request, daemon=True).start()
        code = command[-1].replace("8000", str(port))
        assert str(port) in code
        done = subprocess.run(
            [sys.executable, *command[1:-1], code], capture_output=True, timeout=120
        )
    assert (done.returncode == 0) is healthy
    assert asked == ([] if status is None else ["/health"])


def test_docker_waits_longer_than_the_server():
    [run] = [
        line
        for block in blocks(DOCS.read_text())
        for line in block.splitlines()
        if "docker run" in line
    ]
    words = shlex.split(run)
    assert int(words[words.index("--stop-timeout") + 1]) >= 30 + 10
    assert {"--read-only", "--cap-drop", "no-new-privileges", "127.0.0.1:8000:8000"} <= set(words)
    assert words[words.index("--tmpfs") + 1] in WRITABLE
    [mount] = [word for word in words if word.startswith("/etc/quire")]
    assert arguments_of(run)[-1] == mount.split(":")[1], (
        "the keys are read from where they are mounted"
    )


# systemd


def test_the_unit_is_confined():
    assert set(UNIT) == {"Unit", "Service", "Install"}
    keys = [key for key, _ in UNIT["Service"] if key not in ("Environment", "SystemCallFilter")]
    assert len(keys) == len(set(keys)), "said twice"
    on = """DynamicUser NoNewPrivileges ProtectHome PrivateTmp PrivateDevices PrivateUsers ProtectKernelTunables
        ProtectKernelModules ProtectKernelLogs ProtectControlGroups ProtectClock ProtectHostname RestrictNamespaces
        RestrictRealtime RestrictSUIDSGID LockPersonality RemoveIPC""".split()
    assert [key for key in on if SERVICE.get(key) != "yes"] == []
    assert SERVICE["ProtectSystem"] == "strict" and SERVICE["CapabilityBoundingSet"] == ""
    assert (
        SERVICE["UMask"] == "0077"
        and SERVICE["LimitCORE"] == "0"
        and int(SERVICE["LimitNOFILE"]) >= 65536
    )
    filters = [value for key, value in UNIT["Service"] if key == "SystemCallFilter"]
    assert (
        filters == ["@system-service", "~@privileged"]
        and SERVICE["SystemCallArchitectures"] == "native"
    )
    assert not {"MemoryDenyWriteExecute", "ProcSubset", "User"} & set(SERVICE)
    assert "XLA" in UNIT_TEXT.partition("MemoryDenyWriteExecute")[2].partition("\n")[0], (
        "the reason stands beside it"
    )


def test_the_unit_keeps_its_caches_and_its_keys():
    assert SERVICE["CacheDirectory"] == SERVICE["StateDirectory"] == "quire"
    places = dict(
        part.split("=", 1)
        for _, value in UNIT["Service"]
        if _ == "Environment"
        for part in value.split()
    )
    assert places["XDG_CACHE_HOME"] == "%C", "quire adds its own name"
    assert places["HF_HOME"].startswith("%C/quire/") and places["HOME"] == "%S/quire"
    name, _, source = SERVICE["LoadCredential"].partition(":")
    assert source.startswith("/etc/quire/")
    words = arguments_of(SERVICE["ExecStart"])
    assert words[words.index("--api-key-file") + 1] == f"%d/{name}"
    assert words[-1] == "$SERVE_ARGS" and "SERVE_ARGS" in places
    assert words[words.index("--host") + 1] == "127.0.0.1"


def test_grace_of_the_unit():
    assert SERVICE["KillSignal"] == "SIGTERM" and SERVICE["KillMode"] == "mixed"
    assert seconds(SERVICE["TimeoutStopSec"]) >= grace(arguments_of(SERVICE["ExecStart"])) + 10
    assert SERVICE["Restart"] == "on-failure" and dict(UNIT["Unit"])["StartLimitBurst"]
    for wait in (
        SERVICE["TimeoutStopSec"],
        f"terminationGracePeriodSeconds: {POD['spec']['terminationGracePeriodSeconds']}",
    ):
        assert wait in DOCS.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path):
    text = UNIT_TEXT.replace("/opt/quire/bin/quire", sys.executable)
    (tmp_path / "quire.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "quire.service")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


# The page


def test_the_page_names_files_that_exist():
    page = DOCS.read_text()
    names = re.findall(r"`((?:deploy/|kubernetes/)[\w./]+)`", page) + re.findall(
        r"-[kf] (deploy/\S+)", page
    )
    assert names
    for name in names:
        if name != "deploy/grafana.json":  # made by its own generator
            assert (ROOT / name).exists() or (DEPLOY / name).exists(), name
    rows = re.findall(r"^\| (`[^|]+`) \| ", page.partition("## How much")[0], re.M)
    assert {"`Dockerfile`", "`quire.service`"} <= set(rows)


@pytest.mark.parametrize("language, needed", [
    ("nginx", ["proxy_buffering off;", "proxy_set_header Host localhost;", "proxy_http_version 1.1;"]),
    ("caddy", ["header_up Host localhost"]),
])  # fmt: skip
def test_proxies_pass_streams_and_a_name_that_is_accepted(language, needed):
    [block] = re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    assert all(line in block for line in needed)
    idle = 60  # --idle-seconds
    waits = [int(own) for own in re.findall(r"keepalive(?:_timeout)? (\d+)s", block)]
    assert waits and max(waits) < idle, "the server must not close what the proxy is about to use"
