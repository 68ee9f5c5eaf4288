"""Where arrays lie: the mesh, the rules that map logical axes to it, and array specs."""
