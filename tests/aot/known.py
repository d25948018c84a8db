"""Steps that make an array as large as a layer's keys to move numbers alone, by what they are compiled for."""

_TURNED = "keys that lie unrotated are turned whenever they are read, which takes a layer of them"
_MERGED = "a merge makes a layer's slots anew, to write them behind the layer's attention"
_ORDERED = (
    "slots that are judged by their neighbours are put in the order of their tokens, where rows are due"
)
_DECODED = "codes without a kernel are decoded, a layer at a time"

KNOWN: dict[str, dict[str, str]] = {"cpu": {}, "v5e:2x2": {}, "h100": {}}
