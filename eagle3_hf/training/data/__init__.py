"""From chats in files to batches of token ids with labels."""
