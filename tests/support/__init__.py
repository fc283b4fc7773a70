"""What tests share: runs, servers, models, waiting."""
