"""Integrations into other libraries, each optional: transformers, diffusers, ONNX.

Nothing here is imported by `import flashtile`, and each module needs its library only when it is used.
"""
