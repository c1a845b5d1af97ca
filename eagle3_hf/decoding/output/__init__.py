"""What a `generate` call returns: tokens chosen, processed, stopped and streamed as plain decoding would."""
