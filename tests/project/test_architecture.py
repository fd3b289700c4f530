"""The house's rules, read from the source: what may import what, what is asked where, how large it may grow."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from vulture import Vulture

from geotrain.families import FAMILIES, family_of
from tests.support.code_lines import code_lines
from tests.support.code_lines import sources as code_files

ROOT = Path(__file__).parents[2]
PRODUCT = ("geotrain", "kernels", "launch")  # its folders
# Lowest first. A module may import its own layer and every lower one.
LAYERS = [
    {"common"},
    {"families"},
    {"config", "kernels"},
    {"data"},
    {"parameters", "staging"},
    {"parallelism"},
    {"outer", "optimizers"},
    {"inner", "net", "plan", "simulate", "monitor", "emulate"},
    {"checkpoint"},
    {"worker"},
    {"own_loop", "launch", "commands"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ONLY_IN = {  # who may import these
    "deepspeed": {"inner"},
    **{library: {"inner"} for library in ("megatron", "apex", "transformer_engine")},
    "grpc": {"net"},
}
# Door → lines of code that must be read to know all that runs behind it, at most: of its import closure, wherever the
# files lie, so that nothing is won by moving or cutting them.
DOORS = {
    "worker.loop": 5_930,
    "net.transport.worker_client": 3_875,
    "outer.server.server": 6_460,
    "worker.trainer": 9_452,
    "net.server.server_process": 14_850,
}
SUMS = {"product": PRODUCT, "benchmarks": ("benchmarks",), "tests": ("tests",)}
# Lines of code that an issue grants, and that nobody has spent. Who spends some takes them away here in the same
# push: a sum, with what is left of its grants, never rises.
GRANTED = {"waiting answers": {"product": 0, "benchmarks": 0, "tests": 0}}
# Each sum with its grants where git knows no other commit to compare with, such as on main itself in CI.
RECORDED = {"product": 37_160 + 2_400, "benchmarks": 11_468 + 800, "tests": 35_842 + 1_600}
# Called by the library that the method's class is handed to, never by name from here.
CALLED_BY_LIBRARIES = [
    *("__init_subclass__", "__getattr__"),  # Python itself
    # http.server
    *("do_GET", "log_message", "service_actions", "handle_error"),
    # DeepSpeed: of its engine, of an optimizer, of an `mpu`
    *("_configure_zero_optimizer", "_configure_bf16_optimizer"),
    *("create_grad_acc_hooks", "_scheduler_from_config"),
    *("get_model_parallel_rank", "get_model_parallel_world_size"),
    *("get_tensor_model_parallel_world_size", "get_pipeline_model_parallel_world_size"),
    *("_resolve_qk_norm_config", "get_query_key_value_tensors"),  # Megatron-core: of attention
    *("on_train_begin", "on_step_end", "on_train_end"),  # transformers: of a callback
    "intercept_service",  # gRPC: of an interceptor
]
CALLED_BY_DECORATORS = ["@*.command", "@command", "@*.callback", "@field_validator", "@model_validator"]


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def sources() -> list[tuple[str, Path]]:
    """(dotted name inside geotrain, file) of every module, kernels and launch included."""
    found = []
    for folder, prefix in (("geotrain", ""), ("kernels", "kernels."), ("launch", "launch.")):
        for path in files(folder):
            dotted = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found.append((prefix + dotted.removesuffix(".__init__").removesuffix("__init__"), path))
    return [(name.removesuffix("."), path) for name, path in found if name]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree, in no particular order."""
    return list(ast.walk(tree(path)))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(path: Path, also_for_types: bool = True) -> list[str]:
    """Every absolute module name that the file imports, anywhere in it.

    also_for_types: also those in an `if TYPE_CHECKING`, which are not there at run time.
    """
    return [name for name, for_types in all_imports(path) if also_for_types or not for_types]


@cache
def all_imports(path: Path) -> list[tuple[str, bool]]:
    """What the file imports, and whether it is for types alone."""
    for_types = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", id(node) in for_types) for alias in node.names]
    return found


@pytest.mark.parametrize(("name", "path"), sources(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_run_downward(name: str, path: Path) -> None:
    top = name.split(".")[0]
    assert top in LEVEL, f"geotrain.{top} has no place in LAYERS"
    for imported in imports(path):
        parts = imported.split(".")
        if parts[0] == "geotrain" and len(parts) > 1 and parts[1] in LEVEL:
            assert LEVEL[parts[1]] <= LEVEL[top], f"geotrain.{name} imports upward: {imported}"
            pair = {top, parts[1]}
            assert pair != {"inner", "outer"}, (
                f"geotrain.{name}: inner and outer may not know each other ({imported})"
            )
        only = ONLY_IN.get(parts[0])
        assert only is None or top in only, f"geotrain.{name} imports {imported}: only {sorted(only)} may"
        assert parts[0] not in PRODUCT[1:], f"geotrain.{name}: import geotrain.{imported}, not {imported}"
        assert parts[0] not in ("tests", "benchmarks"), f"geotrain.{name} imports {imported}, which is not installed"


@cache
def import_graph() -> dict[str, set[str]]:
    """Module → modules of the product that it imports, in functions too; not those for types alone."""
    modules = dict(sources())

    def module(imported: str) -> str | None:
        """What `from geotrain.a import b` runs: a.b, where that is a module, else a."""
        name = imported.removeprefix("geotrain.")
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        return name if name in modules and imported.startswith("geotrain.") else None

    return {
        name: {found for i in imports(path, also_for_types=False) if (found := module(i)) not in (None, name)}
        for name, path in modules.items()
    }


def test_no_imports_go_round_in_circles() -> None:
    assert sum(map(len, import_graph().values())) > 300  # it was read at all
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"import each other: {error.args[1]}")


def test_outer_is_pure() -> None:
    """State machines know no clock, socket, disk or thread."""
    banned = {"time", "datetime", "socket", "threading", "concurrent", "asyncio", "pathlib", "os", "random"}
    for name, path in sources():
        if name.startswith("outer"):
            used = {imported.split(".")[0] for imported in imports(path)} & (banned | {"subprocess"})
            assert not used, f"geotrain.{name} imports {used}"


@pytest.mark.parametrize(
    ("pattern", "folders", "answered_in"),
    [
        (
            r"(isinstance\(|type\(.*(is|==)|case) ?.*\b(Global|Region)Server\b",
            (*PRODUCT, "benchmarks"),
            "geotrain/outer/",
        ),
        (r"\.levels\s*([!=<>]=|[<>])|[!=<>]=\s*[\w.]+\.levels\b|match .*\.levels:", PRODUCT, "geotrain/config/"),
        (r"([!=]=|\bin|\bcase) .*[\"']sync[\"']", PRODUCT, "geotrain/outer/rules/"),
    ],
    ids=["kind of server", "levels", "sync"],
)
def test_a_question_is_asked_in_one_place(pattern: str, folders: tuple[str, ...], answered_in: str) -> None:
    """What a server, a topology or a rule should answer by itself."""
    asked = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files(*folders)
        if not path.relative_to(ROOT).as_posix().startswith(answered_in)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not asked, f"asked outside {answered_in}: {', '.join(asked)}"


def test_a_class_has_a_name_of_its_own() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files(*PRODUCT):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(where(path, node))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert not twice, f"one name, several classes: {twice}"


def test_nothing_is_there_that_nobody_calls() -> None:
    """Functions, classes, methods and constants of the product to which it, tests and benchmarks never refer."""
    families = [type(family_of(model_type)).__name__ for model_type in FAMILIES]  # found by their files' names
    vulture = Vulture(ignore_names=[*CALLED_BY_LIBRARIES, *families], ignore_decorators=CALLED_BY_DECORATORS)
    vulture.scavenge([str(ROOT / folder) for folder in (*PRODUCT, "benchmarks", "tests")])
    kinds = ("function", "class", "method", "property")
    unused = [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno} {item.name}"
        for item in vulture.get_unused_code()
        if item.filename.relative_to(ROOT).parts[0] in PRODUCT
        and (item.typ in kinds or (item.typ == "variable" and item.name.isupper()))
    ]
    assert not unused, f"nobody refers to {unused}"


def test_the_allowances_are_needed() -> None:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    defined = {n.name for path in files(*PRODUCT) for n in nodes(path) if isinstance(n, functions)}
    assert set(CALLED_BY_LIBRARIES) <= defined, f"not there any more: {set(CALLED_BY_LIBRARIES) - defined}"


def test_every_module_has_a_folder() -> None:
    loose = {path.name for path in (ROOT / "geotrain").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert not loose, f"give each a folder: {sorted(loose)}"


@pytest.mark.parametrize("depth", [1, 2])
def test_folders_have_no_circles(depth: int) -> None:
    """depth: of the folders inside geotrain. A folder and those inside it count as one where they import each
    other."""
    modules, graph = dict(sources()), defaultdict(set)

    def folder(name: str) -> str:
        within = name if modules[name].name == "__init__.py" else name.rpartition(".")[0]
        return ".".join(within.split(".")[:depth]) or name  # __main__ stands for itself

    for name, imported in import_graph().items():
        for other in map(folder, imported):
            if other != (own := folder(name)) and not other.startswith(f"{own}.") and not own.startswith(f"{other}."):
                graph[own].add(other)
    assert sum(map(len, graph.values())) > 60  # it was read at all
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def behind(door: str) -> set[str]:
    """The modules that the door imports, and all that these import."""
    graph, seen, todo = import_graph(), {door}, [door]
    while todo:
        found = graph[todo.pop()] - seen
        seen |= found
        todo += found
    return seen


@pytest.mark.parametrize(("door", "most"), DOORS.items())
def test_what_is_behind_a_door_can_be_read(door: str, most: int) -> None:
    modules = dict(sources())
    names = behind(door)
    lines = sum(code_lines(modules[name]) for name in names)
    assert lines <= most, f"{lines} lines of code in {len(names)} files"


def test_a_rank_imports_no_server() -> None:
    names = behind("net.transport.worker_client")
    servers = {
        name for name in names if name.startswith(("net.server", "net.storage", "outer.server", "outer.shards"))
    }
    assert len(names) > 20 and not servers, sorted(servers)


def git(*arguments: str) -> bytes:
    """Run git; nothing where it fails or there is no history."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60)
    return done.stdout if done.returncode == 0 else b""


def with_grants(root: Path) -> dict[str, int]:
    """Each sum of lines of code of a checkout, with what is left of its grants. Commits without grants: today's."""
    rules = ast.parse((root / Path(__file__).relative_to(ROOT)).read_text())
    values = [n.value for n in rules.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "GRANTED"]
    granted = ast.literal_eval(values[0]) if values else GRANTED
    return {
        name: sum(map(code_lines, code_files(root / folder for folder in folders)))
        + sum(lines[name] for lines in granted.values())
        for name, folders in SUMS.items()
    }


def test_size_only_falls(tmp_path: Path) -> None:
    """Against the commit before the push: where this one left its upstream's main. Each in between may grow, and a
    sum where the same push takes as much from the others."""
    before, (base, head) = RECORDED, (git("merge-base", "HEAD", "origin/main"), git("rev-parse", "HEAD"))
    if base and base != head:
        folders = (folder for folders in SUMS.values() for folder in folders)
        with tarfile.open(fileobj=io.BytesIO(git("archive", base.decode().strip(), *folders))) as archive:
            archive.extractall(tmp_path, filter="data")
        before = with_grants(tmp_path)
    now = with_grants(ROOT)
    grown = {name: f"{now[name]} of {most}" for name, most in before.items() if now[name] > most}
    less = sum(now.values()) <= sum(before.values())
    assert less or not grown, f"lines of code with their grants, by sum: {grown}: find what can go, or spend a grant"


def test_processes_run_the_installed_geotrain() -> None:
    """`python -m` looks into the current folder first: a checkout there would stand in for what uv or pip installed,
    and has `launch` and `kernels` elsewhere. Not so with -P."""
    for path in files(*PRODUCT):
        for node in nodes(path):
            if isinstance(node, ast.Tuple | ast.List):
                words = [getattr(word, "value", None) for word in node.elts]
                assert "-m" not in words or words[words.index("-m") - 1] == "-P", where(path, node)


def test_files_can_be_read_in_a_sitting() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in files(*PRODUCT, "tests", "benchmarks")
        if (n := len(p.read_text().splitlines())) > 500
    }
    assert not long, f"over 500 lines: {long}"


SHARED = ("support", "chaos", "contexts", "mutants", "simulation", "stack")  # folders whose modules others import


def test_tests_share_through_support() -> None:
    """A test module is imported by nobody; helpers lie in tests/support, those of a kind of tests beside them."""
    for path in files("tests", "benchmarks"):
        for imported in imports(path):
            if imported.split(".")[0] == "tests":
                shared = SHARED if "test_" not in imported else SHARED[:1]
                assert imported.startswith(tuple(f"tests.{folder}" for folder in shared)), (
                    f"{path.relative_to(ROOT)} imports {imported}"
                )
    for path in files("tests"):
        folder, known = path.relative_to(ROOT / "tests").parts[0], path.name in ("__init__.py", "conftest.py")
        assert known or folder in SHARED or path.name.startswith("test_"), f"{path}: put helpers in tests/support"
        repeated = f"test_{path.parent.name}_"
        assert not path.name.startswith(repeated), f"{path.relative_to(ROOT)}: its folder says {path.parent.name}"


def test_what_is_slow_to_import_waits() -> None:
    """The first bare import of megatron decides for a whole process: it decorates by torch.compile, which takes 2 s
    on a CPU, and then other functions are tested than ranks call. DCP takes a fifth of a server's start."""
    late = {"megatron": ("geotrain", "launch", "tests", "benchmarks"), "torch.distributed.checkpoint": PRODUCT}
    bare = [
        where(path, node)
        for library, folders in late.items()
        for path in files(*folders)
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node).split()[1].startswith(library)
    ]
    assert not bare, bare


def test_launching_and_operating_import_no_torch() -> None:
    """It takes seconds, of every command that a person types."""
    modules = (
        "launch.launcher",
        "commands.operate",
        "launch.terminal",
        "commands.logs",
        "launch.check",
        "launch.guard",
        "commands.probe",
        "commands.probe_site",
    )
    program = f"import sys, {', '.join(f'geotrain.{m}' for m in modules)}; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "False\n"
