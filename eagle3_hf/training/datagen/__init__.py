"""Training chats and answers, written by the target."""
