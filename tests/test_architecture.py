"""Architecture rules: allowed imports, banned modules, and the contents of the package."""

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from quire import EXPORTS
from quire.tests.support.violations import require_none

ROOT = Path(__file__).parents[1]
# Rooms in order: each may import itself and the rooms before it, also inside of functions. A room
# is a folder or a file; a file belongs to the longest room that is a prefix of its path.
ROOMS = """
    sharding/struct sharding/device_axes sharding/spec sharding/mesh sharding/local_shards

    ops/errors ops/cache_folder
    ops/ordered_sum ops/precision ops/activation ops/norm ops/rope ops/implementations ops/gpu
    ops/native ops/linear ops/moe ops/quant ops/model_kernels ops/adapter ops/state_rows
    ops/attention ops/residual ops/heads ops/rounding ops/sampling ops/short_conv ops/delta_net
    ops/linear/gpu_kernel ops/linear/gpu ops/moe/routing ops/moe/gpu

    model/errors model/extras model/stored_format model/classes model/indexer model/recurrent model/config model/matrix
    model/mixers model/weights
    model/partition model/decoder model/encoder model/expert_copies model/families model/gguf model/checkpoint
    model/draft_heads model/planning model/text model/images model/quantize
    model/towers/config model/towers/weights model/towers model/multimodal

    serving/api/errors serving/api/vllm_names serving/api/other_engines serving/api/validation
    serving/speculative/methods serving/speculative/config serving/speculative/draft_state
    serving/api serving/parsing serving/request serving/protocol/answers serving/protocol serving/multihost
    serving/cache serving/speculative serving/media_fetcher serving/media_reader
    serving/device/step_shape serving/device/batch serving/device/state serving/device/media_rows
    serving/device/attend
    serving/speculative/on_device serving/device serving/engine serving/observe
    serving/adapter_store
    serving/defaults serving/vision serving/build serving/follow serving/progress serving/resume serving/chat_prompt
    serving/search serving/llm serving/async_llm
    serving/http serving/http/endpoints serving/http/app serving/http/server serving/ray

    scripts/command scripts/sizes scripts/tables scripts/terminal scripts/options scripts/loading scripts/collect_env
    scripts/build_kernels scripts/convert scripts/quantize scripts/generate scripts/search scripts/chat scripts/run
    scripts/pull scripts/list scripts/rm scripts/run_batch scripts/plan scripts/serve scripts/bench
    scripts/train_heads scripts/gpu scripts
""".split()
LAYERS = tuple(dict.fromkeys(room.partition("/")[0] for room in ROOMS))
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
FILES += [ROOT / "__init__.py", ROOT / "__main__.py"]
TOOLS = sorted((ROOT / "tools").rglob("*.py"))  # for development: not in the wheel
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))  # for users: in the repository, in no package
NO_JAX = (
    "serving/api/*",
    "serving/parsing/*",
    "serving/request/*",
    "serving/protocol/*",
    "serving/cache/*",
    "serving/speculative/[!o]*",  # all but on_device
)
NO_JAX += (
    "serving/engine/scheduler.py",
    "serving/engine/waiting_queue.py",
)
BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "transformers",
}
PEERS = ROOT / "tools" / "peers"
UNRESTRICTED_FILES = [
    *sorted(PEERS.glob("run_*.py")),
    PEERS / "continuous.py",
    PEERS / "answer_gguf.py",
]  # programs that run other engines
# unpickles compiled programs, which are code in any case
UNRESTRICTED_FILES.append(ROOT / "serving" / "device" / "programs.py")
UNRESTRICTED_FILES.append(
    ROOT / "ops" / "attention" / "flashinfer_kernel" / "builder.py"
)  # runs FlashInfer's builder in another process
KERNEL_FILES = ("ops/*_kernel.py", "ops/*_kernel/*.py")
MAX_LINES = 650
# Retired words of names; use delivery, release, tenant and offload instead.
RETIRED_WORDS = {"courier", "disown", "mourners", "party", "spill"}
ALLOWED_HOSTS = {
    "arxiv.org",
    "docs.jax.dev",
    "github.com",
    "huggingface.co",
    "semver.org",
    "www.apache.org",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def module_name(path: Path) -> str:
    """`serving/device/step.py` is `quire.serving.device.step`, and `tools/peers/work.py` is
    `tools.peers.work`.
    """
    components = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(
        components if components[0] == "tools" else ("quire", *components)
    ).removesuffix(".__init__")


def package_name(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(parse(path)))


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, absolute module) of every import of a file, also inside functions."""
    package = package_name(path).split(".")
    found_imports: list[tuple[int, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found_imports += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join((*base, *([node.module] if node.module else ())))
            found_imports += ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    return tuple(found_imports)


def tables() -> Iterator[tuple[Path, str, dict[str, str]]]:
    """Every module-level dict of names to relative modules, or to tuples that begin with one."""
    for path in FILES:
        for node in parse(path).body:
            if not (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and node.value.values
            ):
                continue
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            modules = {
                key: item[0] if isinstance(item, tuple) and item else item
                for key, item in value.items()
            }
            if all(isinstance(item, str) and item.startswith(".") for item in modules.values()):
                yield path, node.targets[0].id, modules  # type: ignore[attr-defined]


def relative_path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_for_module(module: str) -> str | None:
    """The room of a module of Quire or of a name in it: the longest room that is a prefix."""
    path = module.removeprefix("quire.").replace(".", "/")
    return max((room for room in ROOMS if f"{path}/".startswith(f"{room}/")), key=len, default=None)


def test_imports_follow_the_order_of_rooms():
    def violations(path: Path) -> Iterator[str]:
        room = room_for_module(module_name(path))
        if room is None and path.name != "__init__.py":
            yield f"{relative_path(path)} is in no room of ROOMS"
            return
        for line, module in imports(path):
            if not module.startswith("quire."):
                continue
            # Names of the root package are for users and for commands.
            if module.split(".")[1] not in LAYERS:
                if not path.is_relative_to(ROOT / "scripts"):
                    yield (
                        f"{relative_path(path)}:{line} imports {module} from the root, which only "
                        "scripts/ may"
                    )
                continue
            target = room_for_module(module)
            if room is None or target is None:
                yield (
                    f"{relative_path(path)}:{line} imports {module}, and one of the two is in no room of "
                    "ROOMS"
                )
            elif ROOMS.index(target) > ROOMS.index(room):
                yield f"{relative_path(path)}:{line}: {room} must not import {module}"

    require_none(
        (line for path in FILES if path.parent != ROOT for line in violations(path)),
        "A room of ROOMS imports itself and the rooms before it. Move the code to the room that "
        "may import it:",
    )


def test_weight_formats_and_native_kernels_do_not_import_each_other():
    """Both import `ops/linear`, which is the interface between them."""
    for path in FILES:
        for package, other_package in (("native", "quant"), ("quant", "native")):
            if path.is_relative_to(ROOT / "ops" / package):
                violations = [
                    module
                    for _, module in imports(path)
                    if f"{module}.".startswith(f"quire.ops.{other_package}.")
                ]
                assert not violations, f"{relative_path(path)} imports {violations}"


def test_no_import_cycles():
    files = {module_name(path): path for path in [*FILES, *TOOLS]}
    dependencies: dict[str, set[str]] = {}
    for name, path in files.items():
        imported = {
            module if module in files else module.rpartition(".")[0] for _, module in imports(path)
        }
        dependencies[name] = imported & files.keys() - {name}
    graphlib.TopologicalSorter(dependencies).prepare()  # its error names the files of a cycle


def test_packages_import_themselves_relatively():
    def absolute(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []

    require_none(
        (
            f"{relative_path(path)}:{node.lineno} imports {name}"
            for path in [*FILES, *TOOLS]
            for node in nodes(path)
            for name in absolute(node)
            if f"{name}.".startswith((f"{module_name(path).split('.')[0]}.", "quire.tools."))
        ),
        "`quire` and `tools` each import themselves relatively (from ..ops import linear):",
    )


def test_no_imports_or_calls_that_run_code_from_data():
    def violations(path: Path) -> Iterator[str]:
        for line, module in imports(path):
            if module.split(".")[0] in BANNED_MODULES and path not in UNRESTRICTED_FILES:
                yield f"{relative_path(path)}:{line} imports {module}"
        for node in nodes(path):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Name) and function.id in {"eval", "exec", "compile"}:
                yield f"{relative_path(path)}:{function.lineno} calls {function.id}"
            is_switch = isinstance(node, ast.keyword) and node.arg in {
                "allow_pickle",
                "trust_remote_code",
            }
            if is_switch and getattr(node.value, "value", None) is not False:
                yield f"{relative_path(path)}:{node.value.lineno}: {node.arg} must be False"

    require_none(
        (line for path in [*FILES, *TOOLS] for line in violations(path)),
        "Files and sockets hold data, never code (docs/hardening.md). Read them with JSON, "
        "msgspec or safetensors:",
    )


def test_files_are_short_and_have_a_docstring():
    def violations(path: Path) -> Iterator[str]:
        text = path.read_text()
        if (length := len(text.splitlines())) > MAX_LINES:
            yield (
                f"{relative_path(path)}:{MAX_LINES} goes on for {length - MAX_LINES} lines: look whether "
                "it is two nouns"
            )
        if text and not ast.get_docstring(parse(path)):
            yield f"{relative_path(path)}:1 has no docstring: say in one line what the file holds"

    files = [
        path
        for path in [*FILES, *TOOLS]
        if not any(fnmatch(relative_path(path), kernel) for kernel in KERNEL_FILES)
    ]
    require_none(
        (line for path in files for line in violations(path)),
        f"A file has a docstring and at most {MAX_LINES} lines:",
    )


def test_documented_arguments_are_parameters():
    violations = []
    for path in FILES + TOOLS:
        for node in nodes(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            _, _, after = (ast.get_docstring(node) or "").partition("\nArgs:\n")
            section = re.split(r"\n(?=\S)", after)[0]
            names = {
                name
                for line in re.findall(r"^    ([*\w, ]+): ", section, re.MULTILINE)
                for name in re.findall(r"\w+", line)
            }
            parameters = {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
            for name in sorted(names - parameters):
                violations.append(
                    f"{relative_path(path)}:{node.lineno}: {node.name} has no parameter {name}"
                )
    require_none(violations, "`Args:` in a docstring names parameters of the function:")


def test_host_side_modules_import_no_jax():
    names = [
        module_name(path)
        for path in FILES
        if any(fnmatch(relative_path(path), pattern) for pattern in NO_JAX)
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_the_step_uses_jit_in_serving():
    files_with_jit = set()
    for path in sorted((ROOT / "serving").rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in {"jit", "pjit", "pmap"}:
                files_with_jit.add(relative_path(path))
        files_with_jit |= {
            relative_path(path)
            for _, module in imports(path)
            if module.split(".")[-1] in {"jit", "pjit", "pmap"}
        }
    assert files_with_jit == {
        "serving/device/encode.py",
        "serving/device/step.py",
        "serving/device/updates.py",
    }


def test_module_tables_import():
    table_by_file_and_name = {
        (relative_path(path), name): (path, table) for path, name, table in tables()
    }
    assert {
        ("__init__.py", "EXPORTS"),
        ("__main__.py", "COMMANDS"),
        ("model/families/__init__.py", "FAMILIES"),
        ("ops/adapter/__init__.py", "IMPLEMENTATIONS"),
        ("ops/attention/__init__.py", "IMPLEMENTATIONS"),
        ("ops/heads/__init__.py", "IMPLEMENTATIONS"),
        ("ops/residual/__init__.py", "IMPLEMENTATIONS"),
        ("ops/rounding/__init__.py", "IMPLEMENTATIONS"),
        ("ops/linear/__init__.py", "IMPLEMENTATIONS"),
        ("ops/moe/__init__.py", "IMPLEMENTATIONS"),
        ("ops/moe/routing/__init__.py", "IMPLEMENTATIONS"),
    } <= set(table_by_file_and_name)
    for (_, name), (path, table) in table_by_file_and_name.items():
        for key, module in table.items():
            if module.removeprefix(".") in [file.stem for file in UNRESTRICTED_FILES]:
                continue
            loaded = importlib.import_module(module, package_name(path))
            if name == "EXPORTS":
                assert hasattr(loaded, key)
            if name == "COMMANDS":
                assert loaded.main.__doc__, f"quire {key} has no help"


def test_every_family_file_is_in_the_table():
    listed = {
        module.removeprefix(".")
        for _, name, table in tables()
        if name == "FAMILIES"
        for module in table.values()
    }
    files = {path.stem for path in (ROOT / "model" / "families").glob("*.py")} - {
        "__init__",
        "common",
        "config_keys",
        "rope",
    }
    assert listed == files


def test_setuptools_package_list_is_complete():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {package_name(path) for path in FILES}
    for path in [*FILES, *TOOLS]:
        assert (path.parent / "__init__.py").exists(), f"{path.parent} lacks __init__.py"
    top = {path.parent.name for path in ROOT.glob("[!.]*/__init__.py")}
    assert top == {*LAYERS, "tools"}, "a package is missing in LAYERS"


def test_packaged_code_imports_no_tools_or_tests():
    require_none(
        (
            f"{relative_path(path)}:{line} imports {module}"
            for path in FILES
            for line, module in imports(path)
            if f"{module}.".startswith(("tools.", "tests.", "quire.tools.", "quire.tests."))
        ),
        "tools/ and tests/ are not in the wheel, and nothing in the wheel may import them:",
    )


def test_examples_import_only_public_names():
    require_none(
        (
            f"{relative_path(path)}:{node.lineno} imports {alias.name} from {node.module}"
            for path in EXAMPLES
            for node in nodes(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quire"
            for alias in node.names
            if node.module != "quire" or alias.name not in EXPORTS
        ),
        "Examples import what `quire` itself exports:",
    )


def test_every_data_file_is_packaged():
    patterns = [
        f"{name.replace('.', '/').replace('quire', '.', 1)}/{pattern}".removeprefix("./")
        for name, globs in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in globs
    ]
    files = [path for layer in LAYERS for path in (ROOT / layer).rglob("*") if path.is_file()]
    require_none(
        (
            relative_path(path)
            for path in files
            if path.suffix not in {".py", ".pyc"}
            and not any(fnmatch(relative_path(path), pattern) for pattern in patterns)
        ),
        "Data files are listed in pyproject.toml, [tool.setuptools.package-data]:",
    )


def test_importing_quire_loads_no_heavy_library():
    """`import quire` and the modules of all commands load neither JAX nor numpy: `quire --help` is
    instant.
    """
    code = (
        "import sys, importlib, quire\nfrom quire.__main__ import COMMANDS\nfor module, _ in "
        "COMMANDS.values(): importlib.import_module(module, 'quire')\nheavy = {'jax', 'numpy', "
        "'flax', 'tokenizers', 'huggingface_hub', 'safetensors'} & set(sys.modules)\nsys.exit(', "
        "'.join(sorted(heavy)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_engine_and_server_load_no_optional_library():
    """Neither an engine nor a server imports what only some commands need."""
    code = (
        "import sys, quire, quire.serving.http.app\n"
        "quire.LLM, quire.AsyncLLM\n"
        "heavy = {'flax', 'optax', 'orbax', 'matplotlib', 'scipy', 'torch'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_sources_have_no_local_paths_and_only_allowed_hosts():
    paths = [*FILES, *TOOLS, *EXAMPLES, *(ROOT / "tests").rglob("*.py"), ROOT / ".ci" / "run"]
    paths += [path for path in (ROOT / ".github").rglob("*") if path.is_file()]
    paths += [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    private = [str(ROOT), str(Path.home())] if len(str(Path.home())) > 1 else [str(ROOT)]
    private_path = re.compile("|".join(rf"(?<![\w.]){re.escape(place)}(?!\w)" for place in private))

    def violations(path: Path) -> Iterator[str]:
        for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
            if match := private_path.search(line):
                yield f"{relative_path(path)}:{number} mentions {match[0]}"
            for host in re.findall(r"https?://([\w.-]*\w)", line):
                # .example is reserved (RFC 2606).
                if host not in ALLOWED_HOSTS | {"localhost", "127.0.0.1"} and not host.endswith(
                    ".example"
                ):
                    yield f"{relative_path(path)}:{number} links to {host}"

    require_none(
        (line for path in paths for line in violations(path)),
        "Write relative paths, and link to ALLOWED_HOSTS only:",
    )


def test_only_publish_renames_files():
    """Only `publish` uses temporary names that are unique across containers."""

    def renames(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            return False
        by_os = ast.unparse(node.func.value) == "os" and node.func.attr == "replace"
        by_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
        return by_os or by_path or node.func.attr in {"rename", "renames"}

    require_none(
        (
            f"{relative_path(path)}:{node.lineno} calls {ast.unparse(node.func)}"
            for path in [*FILES, *TOOLS]
            if path != ROOT / "ops" / "cache_folder.py" and path not in UNRESTRICTED_FILES
            for node in nodes(path)
            if renames(node)
        ),
        "Use `publish` of ops/cache_folder.py:",
    )


def test_retired_words_are_not_used():
    def violations(path: Path) -> Iterator[str]:
        if not re.search("|".join(RETIRED_WORDS), path.read_text(), re.IGNORECASE):
            return  # splitting a file into tokens takes 10 ms
        with path.open("rb") as file:
            names = [
                token for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME
            ]
        for token in names:
            for word in RETIRED_WORDS & {
                word.lower() for word in re.findall("[A-Z]?[a-z]+", token.string)
            }:
                yield f"{relative_path(path)}:{token.start[0]}: {token.string} has the word {word}"

    require_none(
        (
            line
            for path in [*FILES, *TOOLS, *(ROOT / "tests").rglob("*.py")]
            for line in violations(path)
        ),
        "Use the word that replaces these (RETIRED_WORDS):",
    )
