"""What is installed: unified_models with its adapters inside, and nothing else at the top level."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
TAKEN = ("pyproject.toml", "README.md", "LICENSE", "adapters", "configs", "unified_models", "tests")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing but PATH and what is named, and catch what it prints."""
    path = {"PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=path, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds, links kept; builds do not touch the work tree."""
    copy = tmp_path_factory.mktemp("clone")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in TAKEN:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def wheel(source: Path, into: Path) -> Path:
    """Build the wheel of a folder or an sdist, offline."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    done = run(*PIP, "wheel", *offline, "--wheel-dir", into, source, cwd=into, HOME=str(into))
    assert done.returncode == 0, done.stderr
    (built,) = into.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def from_folder(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the folder."""
    return wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def from_sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    into = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(into)!r})"
    done = run(sys.executable, "-c", build, cwd=tree)
    assert done.returncode == 0, done.stderr
    (sdist,) = into.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not any("/configs/" in name for name in archive.getnames())
    return wheel(sdist, into)


@pytest.mark.parametrize("built", ["from_folder", "from_sdist"])
def test_wheel_holds_the_package_only(built: str, request: pytest.FixtureRequest) -> None:
    with zipfile.ZipFile(request.getfixturevalue(built)) as archive:
        names = [Path(name) for name in archive.namelist()]
    assert {p.parts[0] for p in names} == {"unified_models", "unified_models-0.1.0.dist-info"}
    ours = [p.relative_to(ROOT) for p in (ROOT / "unified_models").rglob("*.py")]
    ours += [
        Path("unified_models") / p.relative_to(ROOT) for p in (ROOT / "adapters").rglob("*.py")
    ]
    assert Path("unified_models/adapters/__init__.py") in names
    assert not set(ours) - set(names), "left out of the wheel"
    assert Path("unified_models/py.typed") in names
    assert not [p for p in names if p.suffix == ".json"], "configs/ stays out of the wheel"


def test_installed_wheel_imports(from_folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(from_folder) as archive:
        archive.extractall(tmp_path / "site")
    code = "import unified_models.adapters as a; print(a.__file__)"
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout.strip() == str(tmp_path / "site/unified_models/adapters/__init__.py"), (
        done.stderr
    )


def test_checkout_imports(tree: Path) -> None:
    code = "import unified_models.adapters as a; print(a.__file__)"
    done = run(sys.executable, "-c", code, cwd=tree, PYTHONPATH=".")
    assert done.stdout.strip() == str(tree / "unified_models/adapters/__init__.py"), done.stderr


def test_works_without_triton_or_cuda_G04(tree: Path, tmp_path: Path) -> None:
    """Triton cannot be imported, no library of CUDA kernels either: make, load, score."""
    program = """
import sys
sys.modules |= dict.fromkeys(("triton", "vllm", "deep_gemm", "flash_mla", "mamba_ssm", "transformers"))
import unified_models as um
um.make_tiny("nemotron_h", sys.argv[1])
print(len(um.logprobs(um.load(sys.argv[1]), [[1, 2, 3]])[0]))
"""
    done = run(sys.executable, "-c", program, tmp_path / "tiny", cwd=tree, PYTHONPATH=str(tree))
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_top_level_adapters_is_refused(tree: Path) -> None:
    done = run(sys.executable, "-c", "import adapters", cwd=tree)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "write `import unified_models.adapters`" in done.stderr
    assert (
        "ModuleNotFoundError" in run(sys.executable, "-P", "-c", "import adapters", cwd=tree).stderr
    )
