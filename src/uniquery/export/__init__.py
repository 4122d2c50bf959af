"""Models as ONNX files, with the proof that they predict the same."""
