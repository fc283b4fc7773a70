-- Remove entries below an id, where a mark still stands: a server that has lost the mark may have lost entries and
-- given their ids, or lower ones, to others.
-- KEYS: stream, hash.  ARGV: id, field of the hash, mark.  Returns how many were removed, or -1 without the mark.
if redis.call('HGET', KEYS[2], ARGV[2]) ~= ARGV[3] then
  return -1
end
return redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
