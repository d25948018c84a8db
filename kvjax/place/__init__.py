"""Place: where slots live. Dense arrays need nothing from here; pages, prefixes and meshes do."""
