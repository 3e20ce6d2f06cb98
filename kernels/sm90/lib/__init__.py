"""Device code that the forward and the backward share: pipelines, tile scheduler, softmax, packed sequences."""
