"""The linear branch of sparse-linear attention, as published: what RoLA has to beat."""
