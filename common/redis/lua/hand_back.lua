-- Give held entries back at once: the next reclaim takes them. This delivery counts, unless it is taken off.
-- They get a holder of their own name: a renewal by the one that gives them back, which may be on its way, would make
-- them look held again for a whole lease.
-- Atomic against a worker that has taken an entry over meanwhile: what it holds stays its own.
-- KEYS: input stream.  ARGV: group, consumer, idle milliseconds, deliveries to take off, new holder, entry ids.
for i = 6, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if #held == 1 then
    -- A ticket with a published sample counts 0 deliveries (publish_sample.lua): none can be taken off.
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[i],
      'IDLE', ARGV[3], 'RETRYCOUNT', math.max(held[1][4], 1) - ARGV[4], 'JUSTID')
  end
end
return 1
