"""The dq kernel of the split backward pass, for head dimensions over 128."""
