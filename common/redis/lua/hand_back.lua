-- Give held entries back at once: the next reclaim takes them, and this delivery does not count where it is taken off.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, deliveries to take off, entry ids.
for i = 5, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i],
      'IDLE', ARGV[3], 'RETRYCOUNT', math.max(held[1][4] - ARGV[4], 0), 'JUSTID')
  end
end
return 1
