"""Measures a head: comparison of texts (`check`), speed-up (`bench`), on questions (`tasks`), as tables (`report`)."""
