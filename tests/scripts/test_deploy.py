"""Deployment files (Docker, Kubernetes, systemd): sandboxing, probes, shutdown grace and flags."""

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
UNAUTHENTICATED_PATHS = {"/health", "/ping"}
KNOWN_PATHS = UNAUTHENTICATED_PATHS | {"/metrics"}
USER = 10001
WRITABLE = {"/cache", "/tmp"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MANIFESTS = {
    path: content
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    for content in [yaml.safe_load(path.read_text())]
    if content["kind"] not in ("Kustomization", "Component")
}


MULTI_PROCESS_FOLDERS = {
    "ray",
    "hosts",
}  # several processes serve a model; each is deployed by itself


def manifest(kind: str, folder: str | None = None) -> dict[str, Any]:
    folder_by_path = {path: path.parent.name for path in MANIFESTS}
    [content] = [
        content
        for path, content in MANIFESTS.items()
        if content["kind"] == kind
        and (
            folder_by_path[path] == folder
            if folder
            else folder_by_path[path] not in MULTI_PROCESS_FOLDERS
        )
    ]
    return content


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
    group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])
]


def parse_dockerfile(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of a Dockerfile; continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (instruction, arguments)
        for instruction, _, arguments in (
            line.partition(" ") for line in joined.splitlines() if line.strip()
        )
    ]


DOCKERFILE = parse_dockerfile((DEPLOY / "Dockerfile").read_text())
FINAL_STAGE = DOCKERFILE[
    max(index for index, (word, _) in enumerate(DOCKERFILE) if word == "FROM") :
]


def instruction_arguments(
    instruction: str, dockerfile: list[tuple[str, str]] = FINAL_STAGE
) -> list[str]:
    return [arguments for name, arguments in dockerfile if name == instruction]


def parse_unit(text: str) -> dict[str, list[tuple[str, str]]]:
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
UNIT = parse_unit(UNIT_TEXT)
SERVICE = dict(UNIT["Service"])


def fenced_blocks(text: str) -> Iterator[str]:
    """Fenced code blocks of a page; continued lines are joined."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S):
        yield re.sub(r"\\\n\s*", "", block)


def serve_arguments(command: str) -> list[str]:
    """Arguments after `quire serve`, or after the image's name in `docker run`."""
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
    command_lines = [
        line
        for block in fenced_blocks(page)
        for line in block.splitlines()
        if re.search(r"docker run|quire serve", line)
    ]
    serve_args = [
        line.partition("=")[2]
        for block in fenced_blocks(page)
        for line in block.splitlines()
        if "SERVE_ARGS=" in line
    ]
    words_by_source = {
        "Dockerfile": json.loads(instruction_arguments("ENTRYPOINT")[0]),
        "quire.service": serve_arguments(SERVICE["ExecStart"]),
        "base": SERVER["args"],
        "gpu": GPU_SERVER["args"],
        "ray": RAY_ARGS,
        "docs": [
            *(word for run in command_lines for word in serve_arguments(run)),
            *shlex.split(" ".join(serve_args)),
        ],
        "docs, prose": re.findall(r"`(--[^`]+)`", page),
        "scale-out": re.findall(r"--[a-z][a-z-]+", SCALE_OUT.read_text()),
        "comments": re.findall(r"--[a-z][a-z-]+", "".join(re.findall(r"# .*", all_text()))),
    }
    foreign_flags = {
        "--now",
        "--build-arg",
        "--gpus",
        "--stop-timeout",
    }  # options of systemctl and docker
    return {
        name: {re.split("[ =]", word)[0] for word in words if word.startswith("--")} - foreign_flags
        for name, words in words_by_source.items()
    }


def all_text() -> str:
    paths = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"]
    return "\n".join(path.read_text() for path in paths)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def shutdown_grace(arguments: list[str]) -> float:
    """Seconds of --shutdown-grace."""
    text = " ".join(arguments)
    match = re.search(r"--shutdown-grace[ =](\d+)", text)
    assert match, "another timeout depends on the grace, so that it must be given"
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
def test_documented_defaults_are_those_of_serve():
    options = serve_options()
    assert options["--shutdown-grace"].default == 30 and options["--port"].default == 8000
    for flag, value in re.findall(r"^\| `(--[a-z-]+)` \| (\d+)", DOCS.read_text(), re.M):
        default = options[flag].default
        assert int(value) in (default, default / 2**20), flag


# Kubernetes


def test_every_manifest_is_listed():
    for path in MANIFESTS:
        assert path.name in KUSTOMIZATIONS[path.parent.name]["resources"], path
    for folder, content in KUSTOMIZATIONS.items():
        for resource in content["resources"]:
            assert (KUBERNETES / folder / resource).exists()
    assert all("namespace" not in content["metadata"] for content in MANIFESTS.values())


def test_pod_security_context_is_restricted():
    spec = POD["spec"]
    pod_context = spec["securityContext"]
    assert pod_context["runAsNonRoot"] is True and pod_context["seccompProfile"] == {
        "type": "RuntimeDefault"
    }
    assert pod_context["runAsUser"] == pod_context["runAsGroup"] == pod_context["fsGroup"] == USER
    assert pod_context["fsGroupChangePolicy"] == "OnRootMismatch"
    container_context = SERVER["securityContext"]
    assert container_context == {
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


def test_every_volume_is_mounted_and_writable_paths_have_one():
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    mounts = {mount["name"]: mount for mount in SERVER["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert {
        mount["mountPath"] for mount in mounts.values() if not mount.get("readOnly")
    } == WRITABLE
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["tmp"]["emptyDir"]["sizeLimit"]


def test_api_keys_are_mounted_from_a_secret():
    [volume] = [volume["secret"] for volume in POD["spec"]["volumes"] if "secret" in volume]
    [mount] = [mount for mount in SERVER["volumeMounts"] if mount["name"] == "keys"]
    [item] = volume["items"]
    assert volume["defaultMode"] == 0o440
    for server in (SERVER, GPU_SERVER):
        assert f"--api-key-file={mount['mountPath']}/{item['path']}" in server["args"]
        assert not any(word.startswith("--api-key=") for word in server["args"])
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    metrics_key = endpoint["authorization"]["credentials"]
    assert metrics_key["name"] == volume["secretName"] and metrics_key["key"] != item["key"]
    [create_command] = re.findall(
        r"kubectl create secret generic (\S+) (.*?)\nkubectl", DOCS.read_text(), re.S
    )
    assert create_command[0] == volume["secretName"]
    assert set(re.findall(r"--from-literal=(\w+)=", create_command[1])) == {
        item["key"],
        metrics_key["key"],
    }
    assert "Secret" not in {content["kind"] for content in MANIFESTS.values()}, (
        "a key does not belong into a repository"
    )


@pytest.mark.parametrize("server", [SERVER, GPU_SERVER], ids=["cpu", "gpu"])
def test_resource_requests_equal_limits_in_whole_cores(server):
    resources = server["resources"]
    assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= set(
        resources["limits"]
    )
    assert resources["limits"]["cpu"].isdigit()
    [threads] = [env for env in SERVER["env"] if env["name"] == "PJRT_NPROC"]
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"


def test_containers_set_their_kv_cache_size():
    assert any(word.startswith("--kv-cache-memory-bytes=") for word in SERVER["args"])
    name, share = next(word.split("=") for word in GPU_SERVER["args"] if "memory" in word)
    assert name == "--gpu-memory-utilization" and 0.75 < float(share) < 1
    assert "nvidia.com/gpu" in GPU_SERVER["resources"]["limits"]


def test_probes_use_unauthenticated_paths():
    ports = {port["name"] for port in SERVER["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        request = SERVER[kind]["httpGet"]
        assert request["path"] in UNAUTHENTICATED_PATHS and request["port"] in ports
    for path, content in MANIFESTS.items():
        for probe_path in re.findall(r"path: (/\S+)", path.read_text()):
            # the path of Ray itself
            is_known = probe_path in KNOWN_PATHS or (content["kind"], probe_path) == (
                "RayService",
                "/-/healthz",
            )
            assert is_known or content["kind"] == "Deployment", f"{path}: {probe_path}"


def test_liveness_probe_is_more_patient_than_readiness_probe():
    def probe_seconds(kind: str) -> float:
        return SERVER[kind]["periodSeconds"] * SERVER[kind]["failureThreshold"]

    assert probe_seconds("startupProbe") == 1800
    assert manifest("Deployment")["spec"]["progressDeadlineSeconds"] > probe_seconds("startupProbe")
    stall_seconds = 30
    assert probe_seconds("readinessProbe") < stall_seconds < probe_seconds("livenessProbe")
    assert probe_seconds("livenessProbe") > 4 * probe_seconds("readinessProbe"), (
        "a restart is the last resort"
    )


@pytest.mark.parametrize("server", [SERVER, GPU_SERVER], ids=["cpu", "gpu"])
def test_termination_grace_covers_the_shutdown_grace(server):
    [word, pause] = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    assert (
        POD["spec"]["terminationGracePeriodSeconds"]
        >= int(pause) + shutdown_grace(server["args"]) + 10
    )
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
    assert all(label and label.items() <= labels.items() for label in selected)
    name = manifest("Deployment")["metadata"]["name"]
    assert (
        manifest("ScaledObject")["spec"]["scaleTargetRef"]["name"]
        == name
        == GPU["metadata"]["name"]
    )


def test_service_and_monitor_ports_name_the_container_port():
    [port] = SERVER["ports"]
    assert port["containerPort"] == int(instruction_arguments("EXPOSE")[0]) == 8000
    names = [port_entry["targetPort"] for port_entry in manifest("Service")["spec"]["ports"]]
    names += [
        port_entry["port"] for port_entry in manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    ]
    names += [
        port_entry["port"]
        for rule in manifest("NetworkPolicy")["spec"]["ingress"]
        for port_entry in rule["ports"]
    ]
    assert set(names) == {port["name"]}


def test_network_policy_denies_egress_to_private_networks():
    spec = manifest("NetworkPolicy")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule["from"] and rule["ports"] for rule in spec["ingress"])
    for rule in spec["egress"]:
        assert rule["to"] and {port["port"] for port in rule["ports"]} in ({53}, {443})
    blocks = [to["ipBlock"] for rule in spec["egress"] for to in rule["to"] if "ipBlock" in to]
    assert {"169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(
        blocks[0]["except"]
    )


def test_disruption_budget_allows_node_drains():
    budget = manifest("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1 and "minAvailable" not in budget


def test_autoscaling_queries_metrics_that_exist():
    spec = manifest("ScaledObject")["spec"]
    [trigger] = spec["triggers"]
    queried_metrics = re.findall(r"vllm:(\w+)", trigger["metadata"]["query"])
    assert "num_requests_waiting" in queried_metrics
    source = "".join(path.read_text() for path in (ROOT / "serving").rglob("*.py"))
    metrics = queried_metrics + re.findall(r"`(?:vllm|quire):(\w+)`", DOCS.read_text())
    assert [name for name in metrics if not re.search(rf"\b{name}\b", source)] == []
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
def test_ray_and_multi_host_pods_share_the_security_context(pod):
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
    assert {
        entry["mountPath"] for entry in mounts.values() if not entry.get("readOnly")
    } == WRITABLE | {"/dev/shm"}
    assert volumes["keys"] == next(
        entry for entry in POD["spec"]["volumes"] if entry["name"] == "keys"
    )


def test_ray_replica_resources_match_their_pods():
    """A replica takes all CPUs of its pod, and pods scale as far as replicas."""
    options = parse_serve_options(RAY_ARGS)
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


def parse_serve_options(arguments: list[str]) -> dict[str, Any]:
    """Parse as `quire serve` does; an unknown flag is an error."""
    group: Any = typer.main.get_command(app)
    return group.get_command(None, "serve").make_context("serve", list(arguments)).params


def test_ray_serve_config_is_valid():
    schema = pytest.importorskip("ray.serve.schema")
    schema.ServeDeploySchema.model_validate(SERVED)
    ray_version = importlib.metadata.version("ray")
    [requirement] = PROJECT["project"]["optional-dependencies"]["ray"]
    assert f">={CLUSTER['rayVersion'].rpartition('.')[0]}" in requirement and ray_version
    module, _, name = RAY_APP["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_multi_host_service_selects_the_leaders():
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
def test_multi_host_arguments_use_the_leader_address():
    [container] = LEADER["containers"]
    environment = {
        "LWS_LEADER_ADDRESS": "quire-hosts-0.quire-hosts.default",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    }
    options = parse_serve_options(
        [
            re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word)
            for word in container["args"]
        ]
    )
    assert (options["num_processes"], options["process_id"]) == (HOSTS["size"], 1)
    assert options["coordinator_address"] == f"{environment['LWS_LEADER_ADDRESS']}:1234"


def test_image_tags_are_pinned_to_the_version():
    for folder in ("base", "gpu", "ray", "hosts"):
        [image] = KUSTOMIZATIONS[folder]["images"]
        assert image["name"] == SERVER["image"]
        assert image["newTag"].split("-")[0] == quire.__version__
    text = all_text() + DOCS.read_text()
    assert not re.search(r":latest\b", text)
    assert set(re.findall(r"quire:(\d[\w.]*)", text)) == {quire.__version__}
    [base] = [
        arguments
        for arguments in instruction_arguments("ARG", DOCKERFILE)
        if arguments.startswith("PYTHON=")
    ]
    assert re.fullmatch(r"PYTHON=python:3\.1[2-9]-slim-\w+", base)
    assert all(
        arguments.split()[0] == "${PYTHON}"
        for arguments in instruction_arguments("FROM", DOCKERFILE)
    )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_all_overlays(tmp_path):
    def build_manifests(folder: Path) -> list[dict[str, Any]]:
        run = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return list(yaml.safe_load_all(run.stdout))

    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    kustomization = {
        "resources": ["kubernetes/gpu"],
        "components": ["kubernetes/monitoring", "kubernetes/autoscaling"],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    manifests = {content["kind"]: content for content in build_manifests(tmp_path)}
    assert set(manifests) == {
        content["kind"]
        for path, content in MANIFESTS.items()
        if path.parent.name not in MULTI_PROCESS_FOLDERS
    }
    for folder in MULTI_PROCESS_FOLDERS:
        assert build_manifests(KUBERNETES / folder)
    spec = manifests["Deployment"]["spec"]
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
    [user], [stop], [entry] = (
        instruction_arguments("USER"),
        instruction_arguments("STOPSIGNAL"),
        instruction_arguments("ENTRYPOINT"),
    )
    assert user == f"{USER}:{USER}" and stop == "SIGTERM"
    assert json.loads(entry) == ["quire", "serve", "--host", "0.0.0.0"]
    assert any(f"--uid {USER}" in run for run in instruction_arguments("RUN"))
    assert instruction_arguments("VOLUME") == ["/cache"]
    words = [word for word, _ in FINAL_STAGE]
    assert words.index("USER") > max(
        index for index, word in enumerate(words) if word in ("RUN", "COPY")
    )


def test_the_image_has_no_compiler_and_no_index():
    assert not any(re.search(r"apt|g\+\+|pip|curl", run) for run in instruction_arguments("RUN"))
    assert instruction_arguments("COPY") == ["--from=build /opt/quire /opt/quire"]
    assert "ADD" not in {word for word, _ in DOCKERFILE}


def test_image_caches_lie_in_writable_folders():
    [settings] = instruction_arguments("ENV")
    environment = dict(setting.split("=", 1) for setting in settings.split())
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert any(
            environment[name] == place or environment[name].startswith(f"{place}/")
            for place in WRITABLE
        )
    assert environment["QUIRE_KERNELS"] in " ".join(instruction_arguments("RUN", DOCKERFILE))


def test_image_builds_kernels_for_every_isa():
    [run] = [run for run in instruction_arguments("RUN", DOCKERFILE) if "build-kernels" in run]
    assert re.findall(r"--isa (\S+?)[\s;]", run) == [
        isa for isa in build.ISAS["x86_64"] if "emulated" not in isa
    ]
    assert "chmod -R go+rX" in run, "build-kernels makes folders for their owner alone"


def test_image_installs_the_projects_dependencies(tmp_path):
    """Runs the Dockerfile's line that lists the requirements to install."""
    [run] = [run for run in instruction_arguments("RUN", DOCKERFILE) if "tomllib" in run]
    [code] = re.findall(r'python -c "(.*?)" >', run)
    extras = PROJECT["project"]["optional-dependencies"]
    for ray, cuda, names in (
        ("", "", ["otel"]),
        ("ray", "", ["otel", "ray"]),
        ("", "13", ["otel", "cuda"]),
        ("ray", "12", ["otel", "ray", "cuda12"]),
    ):
        # as the shell expands them
        command = [sys.executable, "-c", code.replace("$RAY", ray).replace("$CUDA", cuda)]
        completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        extra_requirements = [requirement for name in names for requirement in extras[name]]
        assert completed.stdout.splitlines() == [
            *PROJECT["project"]["dependencies"],
            *extra_requirements,
        ]
    command[-1] = code.replace("$RAY", "").replace("$CUDA", "11")
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode, (
        "no extra is for CUDA 11"
    )


def is_docker_ignored(path: str) -> bool:
    """Whether .dockerignore excludes a path.

    The last pattern that matches the path or a folder above it decides.
    """
    components = Path(path).parts
    prefixes = ["/".join(components[: count + 1]) for count in range(len(components))]
    is_out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            names = [pattern, pattern.removeprefix("**/")]
            if any(
                fnmatch.fnmatchcase(prefix, name) and prefix.count("/") >= name.count("/")
                for prefix in prefixes
                for name in names
            ):
                is_out = not line.startswith("!")
    return is_out


def test_docker_context_holds_what_the_wheel_needs():
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
    assert [path for path in sorted(needed) if is_docker_ignored(path)] == []
    for path in (
        ".git/config",
        "tests/scripts/test_deploy.py",
        "docs/deploy.md",
        "deploy/Dockerfile",
        ".venv/bin/python",
        ".env",
    ):
        assert is_docker_ignored(path), path
    assert is_docker_ignored("ops/__pycache__/norm.cpython-312.pyc")
    for sources in instruction_arguments("COPY", DOCKERFILE):
        if not sources.startswith("--from"):
            *names, _ = sources.split()
            assert all(
                (ROOT / name).exists() and (name == "." or not is_docker_ignored(name))
                for name in names
            )


@pytest.mark.parametrize(
    "status, healthy", [(200, True), (503, False), (401, False), (None, False)]
)
def test_image_health_check_against_a_server(status, healthy):
    """Status None: there is no server."""
    [check] = instruction_arguments("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
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
        completed = subprocess.run(
            [sys.executable, *command[1:-1], code], capture_output=True, timeout=120
        )
    assert (completed.returncode == 0) is healthy
    assert paths == ([] if status is None else ["/health"])


def test_documented_docker_run_outlasts_the_shutdown_grace():
    [run] = [
        line
        for block in fenced_blocks(DOCS.read_text())
        for line in block.splitlines()
        if "docker run" in line
    ]
    words = shlex.split(run)
    assert int(words[words.index("--stop-timeout") + 1]) >= 30 + 10
    assert {"--read-only", "--cap-drop", "no-new-privileges", "127.0.0.1:8000:8000"} <= set(words)
    assert words[words.index("--tmpfs") + 1] in WRITABLE
    [mount] = [word for word in words if word.startswith("/etc/quire")]
    assert serve_arguments(run)[-1] == mount.split(":")[1], (
        "the keys are read from where they are mounted"
    )


# systemd


def test_systemd_unit_is_sandboxed():
    assert set(UNIT) == {"Unit", "Service", "Install"}
    keys = [key for key, _ in UNIT["Service"] if key not in ("Environment", "SystemCallFilter")]
    assert len(keys) == len(set(keys)), "a key is given twice"
    enabled_settings = """
        DynamicUser NoNewPrivileges ProtectHome PrivateTmp PrivateDevices PrivateUsers
        ProtectKernelTunables ProtectKernelModules ProtectKernelLogs ProtectControlGroups
        ProtectClock ProtectHostname RestrictNamespaces RestrictRealtime RestrictSUIDSGID
        LockPersonality RemoveIPC
    """.split()
    assert [key for key in enabled_settings if SERVICE.get(key) != "yes"] == []
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


def test_systemd_unit_sets_cache_folders_and_credentials():
    assert SERVICE["CacheDirectory"] == SERVICE["StateDirectory"] == "quire"
    environment = dict(
        setting.split("=", 1)
        for _, value in UNIT["Service"]
        if _ == "Environment"
        for setting in value.split()
    )
    assert environment["XDG_CACHE_HOME"] == "%C", "quire adds its own name"
    assert environment["HF_HOME"].startswith("%C/quire/") and environment["HOME"] == "%S/quire"
    name, _, source = SERVICE["LoadCredential"].partition(":")
    assert source.startswith("/etc/quire/")
    words = serve_arguments(SERVICE["ExecStart"])
    assert words[words.index("--api-key-file") + 1] == f"%d/{name}"
    assert words[-1] == "$SERVE_ARGS" and "SERVE_ARGS" in environment
    assert words[words.index("--host") + 1] == "127.0.0.1"


def test_systemd_stop_timeout_covers_the_shutdown_grace():
    assert SERVICE["KillSignal"] == "SIGTERM" and SERVICE["KillMode"] == "mixed"
    assert (
        seconds(SERVICE["TimeoutStopSec"])
        >= shutdown_grace(serve_arguments(SERVICE["ExecStart"])) + 10
    )
    assert SERVICE["Restart"] == "on-failure" and dict(UNIT["Unit"])["StartLimitBurst"]
    for wait in (
        SERVICE["TimeoutStopSec"],
        f"terminationGracePeriodSeconds: {POD['spec']['terminationGracePeriodSeconds']}",
    ):
        assert wait in DOCS.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_analyze_accepts_the_unit(tmp_path):
    text = UNIT_TEXT.replace("/opt/quire/bin/quire", sys.executable)
    (tmp_path / "quire.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "quire.service")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


# The page


def test_deploy_page_names_existing_files():
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
def test_documented_proxies_stream_and_set_an_accepted_host(language, needed):
    [block] = re.findall(rf"^```{language}\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    assert all(line in block for line in needed)
    server_idle_seconds = 60  # --idle-seconds
    keepalive_seconds = [
        int(seconds_text) for seconds_text in re.findall(r"keepalive(?:_timeout)? (\d+)s", block)
    ]
    assert keepalive_seconds and max(keepalive_seconds) < server_idle_seconds, (
        "the server must not close what the proxy is about to use"
    )
