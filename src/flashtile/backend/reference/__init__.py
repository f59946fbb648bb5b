"""Dense attention in a few lines of torch, differentiated by torch.autograd: to read, and to compare with."""
