"""File formats that people mix up with ours: what a suffix promises, and what to do with such a file."""

from __future__ import annotations

import os
from pathlib import Path

FORMATS = {
    ".aero": "a compiled aerogel model",
    ".bin": "a file of weights",
    ".ckpt": "a PyTorch checkpoint",
    ".engine": "a TensorRT engine",
    ".gguf": "a GGUF model",
    ".h5": "a Keras model",
    ".htm": "a web page",
    ".html": "a web page",
    ".jpeg": "a picture",
    ".jpg": "a picture",
    ".json": "a JSON file",
    ".keras": "a Keras model",
    ".mlmodel": "a Core ML model",
    ".mlpackage": "a Core ML model",
    ".npy": "a NumPy array",
    ".npz": "a file of NumPy arrays",
    ".onnx": "an ONNX model",
    ".ort": "an ONNX Runtime model",
    ".parquet": "a table",
    ".pb": "a TensorFlow model",
    ".pdf": "a document",
    ".pickle": "a Python pickle",
    ".pkl": "a Python pickle",
    ".plan": "a TensorRT engine",
    ".png": "a picture",
    ".pt": "a PyTorch checkpoint",
    ".pt2": "a torch.export program",
    ".pth": "a PyTorch checkpoint",
    ".py": "Python code",
    ".safetensors": "a safetensors file",
    ".svg": "a picture",
    ".tflite": "a TensorFlow Lite model",
    ".trt": "a TensorRT engine",
    ".xml": "an OpenVINO model",
    ".yaml": "a YAML file",
    ".yml": "a YAML file",
    ".zip": "an archive",
}
"""What a suffix promises to whoever opens the file; in small letters."""
CHECKPOINT, EXPORTED, ONNX = FORMATS[".pt"], FORMATS[".pt2"], FORMATS[".onnx"]
MAGIC = {
    b"PK\x03\x04": CHECKPOINT,
    b"\x80\x02": CHECKPOINT,
    b"\x80\x04": FORMATS[".pkl"],
    b"\x80\x05": FORMATS[".pkl"],
    b"\x89HDF": FORMATS[".h5"],
}
"""What the first bytes of a file say; torch.save writes a zip archive."""
_WEIGHTS = "Load its weights into a torch.nn.Module, then call aerogel.compile(model, (x,))."
REMEDIES = {
    CHECKPOINT: _WEIGHTS,
    FORMATS[".bin"]: _WEIGHTS,
    FORMATS[".safetensors"]: _WEIGHTS,
    EXPORTED: "Compile torch.export.load(path).module() with an example input.",
    FORMATS[".aero"]: "It is compiled already: aerogel.load(path) opens it.",
}
"""How each becomes a compiled model."""


def describe(path: str | Path) -> tuple[str, str] | None:
    """Return what a file is, by its first bytes or its suffix, and how it becomes a compiled model; None
    where neither tells."""
    suffix = os.path.splitext(path)[1].lower()
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError:
        head = b""
    named = FORMATS.get(suffix)
    by_content = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    zipped = suffix in (".pt2", ".npz", ".zip", ".keras")
    kind = named if by_content is None or zipped else by_content
    if kind is None:
        return None
    if kind == ONNX:
        return kind, f"Compile it first: aerogel.compile({os.fspath(path)!r})."
    return kind, REMEDIES.get(kind, "Export the model to ONNX, or build it as a torch.nn.Module.")
