"""Single .cu files for a cycle simulator, or any GPU box without Python."""
