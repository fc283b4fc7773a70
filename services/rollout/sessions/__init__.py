"""One session: its tokens as they were sampled, the chat format between them, and its players."""
