"""Jobs that RQ workers run, outside of the streams."""
