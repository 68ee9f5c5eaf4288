"""Placement of arrays on devices: the mesh, the rules that map logical axes to it, array specs."""
