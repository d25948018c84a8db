"""Place: where slots are stored. Dense arrays need nothing from here; pages, prefixes and meshes do."""
