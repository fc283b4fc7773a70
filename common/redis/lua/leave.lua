-- Remove a consumer from its group, if nothing is pending for it: pending entries would be removed with it.
-- Atomic against an entry that is delivered to the consumer between check and removal.
-- KEYS: stream.
-- ARGV: group, consumer.
-- Returns 1 removed, or 0 where something is pending.
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then
  return 0
end
redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
