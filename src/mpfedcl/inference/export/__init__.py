"""A trained run as one file for other programs: ONNX, torch.export, safetensors."""
