"""`quire plan`: estimate memory, batch sizes and meshes from a model's configuration."""
