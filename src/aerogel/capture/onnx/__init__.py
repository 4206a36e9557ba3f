"""From an ONNX file to a graph."""
