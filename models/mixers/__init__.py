"""One file per family of mixers; the protocol is `kvjax.models.mixer`."""
