-- Append the bytes of a dead letter to the log they came from, and remove the letter, as one unit.
-- Atomic against a second `requeue` of the same entry.
-- KEYS: dead letters, log.  ARGV: letter's id, then field names and values.
-- Returns 1 done, 0 the letter is gone.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
-- Before the letter goes: where the file ends between them, the bytes are there twice, and never not at all.
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
