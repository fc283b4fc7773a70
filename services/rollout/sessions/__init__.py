"""One session: its tokens as they were sampled, the chat format between them, and who plays it."""
