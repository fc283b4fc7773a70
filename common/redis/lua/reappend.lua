-- Append the bytes of a dead letter to the log they came from, and remove the dead letter, as one unit.
-- Atomic against a second `requeue` of the same entry.
-- KEYS: dead, log.
-- ARGV: dead_id, fields... (name, value).
-- Returns 1 done, 0 the dead letter is gone.
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) == 0 then
  return 0
end
-- Before the dead letter is removed: if the server's file is cut between them, the bytes exist twice, and are not lost.
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
