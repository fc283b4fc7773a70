-- Set a field of a hash, also on a full server. HDEL needs no memory, and a script that has written may go on: a trim
-- begins with its mark, and must not wait for memory that only the trim can free.
-- KEYS: marks.
-- ARGV: field, value.
redis.call('HDEL', KEYS[1], ARGV[1])
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
