"""Images to patches: sizing rules of model families, decoding of image files, worker processes."""
